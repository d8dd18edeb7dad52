"""Results on disk are whole or not there, and what goes wrong is one sentence."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError, FileError
from vllm_kvcompress.policies.parts import profiles
from vllm_kvcompress.tools import files
from vllm_kvcompress.tools.evaluation import runner
from vllm_kvcompress.tools.files import append, check_writable, make_folder, write_whole

FULL = 8192  # bytes, after which the disk is full


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond FULL bytes; the kernel then refuses as on a full disk.

    A fixture would still hold when pytest writes the test's result, maybe to a longer file.
    """
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_whole(path, "old")
    with (
        full_disk(),
        pytest.raises(FileError, match=r"results\.json: File too large; expected"),
    ):
        write_whole(path, "x" * 2 * FULL)
    assert path.read_text() == "old"
    append(path, "y" * (FULL - 4))
    with full_disk(), pytest.raises(FileError, match="File too large"):
        append(path, "z" * 100)
    assert path.read_text() == "old" + "y" * (FULL - 4)
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_readable_while_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a link, which stays one; a device is written to, never replaced."""
    path, link = tmp_path / "real", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    seen: list[str] = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append(path.read_text()))
    write_whole(link, "new")
    assert (seen, path.read_text(), link.is_symlink()) == (["old"], "new", True)
    write_whole(Path(os.devnull), "nothing")
    assert Path(os.devnull).is_char_device()


def test_places_that_cannot_be_written_to_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for call in (
        lambda: make_folder(file / "below"),
        lambda: write_whole(file / "below", ""),
        lambda: write_whole(tmp_path, ""),
        lambda: append(tmp_path / "nowhere" / "file", ""),
        lambda: check_writable(tmp_path),
        lambda: check_writable(tmp_path / ("x" * 5000)),
        lambda: check_writable(Path("/proc/nobody/writes/here")),
    ):
        with pytest.raises(FileError, match="expected a file that can be read and written"):
            call()
    check_writable(tmp_path / "new" / "profile.json")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "text", ['{"a": ', "\x00", "[" * 100_000, "{}", '{"setup": "s", "mode": "m"}', "7"]
)
def test_answers_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / runner.ANSWERS).write_text(text + "\n")
    with pytest.raises(ConfigError, match="line 1: expected an answer of an earlier run"):
        list(runner._read(tmp_path / runner.ANSWERS))
    (tmp_path / runner.PLAN).write_text(text)
    if not text.startswith("{}") and "setup" not in text:
        with pytest.raises(ConfigError, match="expected what an earlier run asked"):
            runner._read_plan(tmp_path / runner.PLAN)


@pytest.mark.parametrize("name", ["headkv", "duoattention"])
def test_profiles_are_read_within_limits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too large, too deep, no text, a folder, a pickle: one sentence each, from `serve`."""
    monkeypatch.setattr(profiles, "MAX_BYTES", 1000)
    path = tmp_path / "profile"
    for content in (b"1" * 1001, b"[" * 900, b"\xff\xfe", b"\x80\x04N.", b"", b"{}", b"nan"):
        path.write_bytes(content)
        options = ["--kv-policy", name, "--kv-profile", str(path)]
        assert main(["serve", "m", *options]) == 2, content
        said = capsys.readouterr().err
        assert said.startswith(f"vllm-kvcompress: error: {path}: expected"), said
        assert said.count("\n") == 1


def test_data_and_results_are_read_within_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too large, without an end, too deep, numbers of too many digits: one sentence each."""
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 20_000)
    large, answers = tmp_path / "large.jsonl", tmp_path / runner.ANSWERS
    large.write_text("x" * 20_001)
    answers.write_text("{}\n" * 10_000)
    with pytest.raises(ConfigError, match="at most 20000 bytes, found more; give a smaller file"):
        list(runner._read(answers))
    command = ["eval", "a/model", "--out", str(tmp_path), "--policies", "snapkv", "--data"]
    for path in (large, Path("/dev/zero")):
        assert main([*command, str(path)]) == 2
        said = capsys.readouterr().err
        assert said.endswith("expected at most 20000 bytes, found more; give a smaller file.\n")
        assert said.count("\n") == 1
    for line in ("[" * 19_000, "9" * 9_000, '{"context": 1}'):
        large.write_text(line)
        assert main([*command, str(large)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"vllm-kvcompress: error: --data {large}, line 1: "), said
        assert said.count("\n") == 1
    assert main(["serve", "m", "--kv-policy", "snapkv", "--config", "/dev/zero"]) == 2
    assert "expected at most 1048576 bytes, found more" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "recommend", "profile"])
def test_commands_say_where_they_cannot_write(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured; nothing is left behind."""
    (tmp_path / "file").write_text("")
    question = {"context": "w5 w6", "question": "w7", "answers": "w8"}
    (tmp_path / "data.jsonl").write_text(json.dumps(question) + "\n")
    options = ["--data", str(tmp_path / "data.jsonl"), "--policies", "snapkv"]
    if command == "profile":
        options = ["--kind", "headkv"]
    before = sorted(tmp_path.iterdir())
    out = str(tmp_path / "file" / "below" / "result")
    assert main([command, "a/model", "--out", out, *options]) == 1
    said = capsys.readouterr().err
    assert said.endswith("expected a file that can be read and written, on a disk with room.\n")
    assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
