"""scripts/setup.sh with local indexes: what it installs from where, and its messages."""

from __future__ import annotations

import http.server
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.local_index import add_package
from tests.scripts.set_up import TORCH, Clone, make_clone


@contextmanager
def listening(handler: Any) -> Iterator[str]:
    """Runs a server on loopback in a thread; yields its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Folder(http.server.SimpleHTTPRequestHandler):
    """Serves an index folder without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def with_pythons(folder: Path, **scripts: str) -> str:
    """Returns a PATH whose interpreters are these scripts, or broken shims."""
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        executable(
            folder / name, scripts.get(name.replace(".", "_"), "echo no such version; exit 127")
        )
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clone, str]:
    """A clone that was set up once, and the script's output."""
    clone = make_clone(tmp_path_factory.mktemp("first"))
    done = clone.set_up(TORCH_INDEX_URL="file:///nowhere")
    assert done.returncode == 0, done.stderr
    return clone, done.stderr


def test_setup_runs_each_step_once_and_names_it(first: tuple[Clone, str]) -> None:
    clone, said = first

    assert clone.installed("torch") == TORCH
    assert clone.installed("alpha") == clone.installed("beta") == "1.0"
    assert [line.split()[1] for line in said.splitlines()] == [
        "installing", "1/4", "2/4", "3/4", "4/4", "done",
    ]  # fmt: skip
    for variables in ({}, {"PYTHON": None}):  # which works with any supported version
        again = clone.set_up(PIP_INDEX_URL="file:///nowhere", **variables)
        assert (again.returncode, again.stderr) == (0, "")


def test_torch_that_the_default_index_lacks_comes_from_another(tmp_path: Path) -> None:
    clone = make_clone(tmp_path, torch_in="pytorch")
    # The first interpreter that works is taken.
    path = with_pythons(tmp_path / "bin", python3_12=f'exec "{sys.executable}" "$@"')

    done = clone.set_up(TORCH_INDEX_URL=(tmp_path / "pytorch").as_uri(), PYTHON=None, PATH=path)

    assert done.returncode == 0, done.stderr
    assert "(python3.12)" in done.stderr
    assert "lacks it, asking file://" in done.stderr
    assert "ERROR" not in done.stderr
    assert clone.installed("torch") == TORCH


def test_pytorch_index_is_used_alone(tmp_path: Path) -> None:
    clone = make_clone(tmp_path, torch_in="pytorch")
    asked = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with listening(Proxy) as address:
        failed = clone.set_up(https_proxy=address)

    assert failed.returncode == 1
    assert set(asked) == {"download.pytorch.org:443"}
    assert "asking https://download.pytorch.org/whl/cpu" in failed.stderr
    assert f"could not install torch=={TORCH}" in failed.stderr
    assert "TORCH_INDEX_URL=" in failed.stderr
    assert "from versions: 2.13.0)" in failed.stderr  # what the default index has instead


def test_downloads_show_progress_on_a_terminal(tmp_path: Path) -> None:
    clone = make_clone(tmp_path)
    payload = os.urandom(400_000).hex()  # pip shows no bar for little
    add_package(clone.index, "alpha", "1.0", files={"alpha.py": f"DATA = {payload!r}"})
    output = b""
    with listening(partial(Folder, directory=str(clone.index))) as address:
        terminal, stderr = pty.openpty()
        process = subprocess.Popen(
            [clone.root / "scripts/setup.sh"],
            env=clone.variables(PIP_INDEX_URL=address, TERM="xterm"),
            stderr=stderr,
            stdout=subprocess.PIPE,
        )
        os.close(stderr)
        while chunk := _read(terminal):
            output += chunk
        os.close(terminal)
        stdout, _ = process.communicate(timeout=600)

    text = output.decode()
    assert process.returncode == 0, text
    assert stdout == b""
    assert "Downloading" in text
    assert "━" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody has the other end any more
        return b""


@pytest.mark.parametrize(
    ("pythons", "python", "said"),
    [
        ({}, None, "no Python 3.11, 3.12 or 3.13 found"),
        ({"python3": "echo 3.14"}, None, "no Python 3.11, 3.12 or 3.13 found"),
        ({}, "python3.12", "PYTHON=python3.12 is no working interpreter"),
        ({"python3": "echo 3.10"}, "python3", "PYTHON=python3 is Python 3.10, but"),
        (
            {"python3_11": 'case "$2" in *version_info*) echo 3.11;; *) exit 1;; esac'},
            None,
            "apt-get install python3.11-dev python3.11-venv libnuma1 (for the Python at /",
        ),
    ],
)  # fmt: skip
def test_setup_names_what_is_missing(
    tmp_path: Path, pythons: dict[str, str], python: str | None, said: str
) -> None:
    clone = make_clone(tmp_path)

    done = clone.set_up(PYTHON=python, PATH=with_pythons(tmp_path / "bin", **pythons))

    assert done.returncode == 1
    assert said in done.stderr
    assert not clone.venv.exists()


def test_setup_keeps_environments_that_it_did_not_make(tmp_path: Path) -> None:
    clone = make_clone(tmp_path)
    theirs = clone.venv / "theirs.txt"
    theirs.parent.mkdir()
    theirs.write_text("precious")

    refused = clone.set_up()
    assert refused.returncode == 1
    assert "was not made by this script" in refused.stderr

    clone.venv.rename(tmp_path / "elsewhere")
    clone.venv.symlink_to(tmp_path / "elsewhere")
    refused = clone.set_up()
    assert refused.returncode == 1
    assert "is a link" in refused.stderr
    assert (tmp_path / "elsewhere/theirs.txt").read_text() == "precious"


def test_setup_recovers_from_a_killed_run(tmp_path: Path) -> None:
    clone = make_clone(tmp_path)
    wheel = clone.index / "beta/beta-1.0-py3-none-any.whl"
    wheel.rename(tmp_path / wheel.name)
    os.mkfifo(wheel)  # what reads it waits for ever
    killed = _start(clone, "3/4 ")
    waiting = _start(clone, "waiting for another set-up")
    # Half of a package, which pip takes for a whole one.
    (clone.modules / "alpha.py").unlink()
    (clone.modules / "alpha-1.0.dist-info/RECORD").unlink()
    wheel.unlink()
    (tmp_path / wheel.name).rename(wheel)

    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    _, said = waiting.communicate(timeout=600)

    assert waiting.returncode == 0, said
    assert "is incomplete" in said
    assert clone.installed("alpha") == clone.installed("beta") == "1.0"
    assert clone.set_up().stderr == ""


def _start(clone: Clone, until: str) -> subprocess.Popen[str]:
    """Starts the script in its own process group; returns once it has printed this."""
    process = subprocess.Popen(
        [clone.root / "scripts/setup.sh"],
        env=clone.variables(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = ""
    while until not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return process


def test_setup_repairs_a_broken_environment(first: tuple[Clone, str]) -> None:
    clone, _ = first

    # As after an update of the system's Python to another version.
    (clone.venv / "bin/python").unlink()
    (clone.venv / "bin/python").symlink_to("/nowhere/python3")
    mended = clone.set_up()
    assert mended.returncode == 0, mended.stderr
    assert "starting over" in mended.stderr

    # As after new locks: what there is stays, and is brought up to date.
    add_package(clone.index, "alpha", "1.1")
    lock = clone.root / "requirements/cpu.lock"
    lock.write_text(lock.read_text().replace("alpha==1.0", "alpha==1.1"))
    updated = clone.set_up()
    assert updated.returncode == 0, updated.stderr
    assert "updating" in updated.stderr
    assert clone.installed("alpha") == "1.1"


def test_setup_rebuilds_for_another_python(first: tuple[Clone, str]) -> None:
    other = _other_python()
    if other is None:
        pytest.skip("no second one of Python 3.11, 3.12 and 3.13 on this machine")
    version, interpreter = other
    clone, _ = first

    done = clone.set_up(PYTHON=interpreter)

    assert done.returncode == 0, done.stderr
    assert "starting over" in done.stderr
    assert [path.name for path in clone.venv.glob("lib/python*")] == [f"python{version}"]
    assert clone.installed("torch") == TORCH
    assert clone.set_up(PYTHON=None).stderr == ""  # what there is, is current


def _other_python() -> tuple[str, str] | None:
    """Returns a supported Python of another version, from PATH or pyenv."""
    names = [f"python3.{minor}" for minor in (11, 12, 13) if minor != sys.version_info.minor]
    candidates = [[name] for name in names]
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        prefixes = tuple(name.removeprefix("python") for name in names)
        candidates += [
            ["env", f"PYENV_VERSION={version}", "python"]
            for version in listed.stdout.split()
            if version.startswith(prefixes)
        ]
    code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            version, _, interpreter = done.stdout.strip().partition(" ")
            if f"python{version}" in names:  # pyenv's choice counts only where its shims come first
                return version, interpreter
    return None
