"""`vllm-kvcompress eval` on the reference model, through real engines."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_questions
from tests.cli.server_process import OUR_SERVE, ROOT, serving
from vllm_kvcompress.cli import eval as eval_command
from vllm_kvcompress.cli import launch, recommend
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError, EngineError
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation import runner
from vllm_kvcompress.tools.evaluation.engine import Engine, Question
from vllm_kvcompress.tools.files import write_whole

MODEL = str(ROOT / "models" / "reference")
DTYPE = fast_dtype()
ENGINE = ["--engine", "enforce_eager=true", "--engine", "max_model_len=2048"]
ENGINE += ["--engine", f"dtype={DTYPE}"]
SAMPLES, LENGTH, BLOCK = 3, 512, 32
FAMILIES = ("single", "multikey")


def questions(
    folder: Path, families: Sequence[str] = FAMILIES, samples: int = SAMPLES
) -> list[str]:
    """Options that ask the reference model's questions, which are written to a new folder."""
    options = []
    for family in families:
        path = folder / f"{family}@{LENGTH}.jsonl"
        lines = reference_questions.rows(family, LENGTH, samples)
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
        options += ["--data", str(path)]
    return options


def evaluate(folder: Path, *more: str, samples: int = SAMPLES) -> int:
    asked = questions(folder.with_name(f"{folder.name}-asked"), samples=samples)
    arguments = ["eval", MODEL, *asked, "--policies", "full,adakv", "--budgets", "0.25"]
    return main([*arguments, "--out", str(folder), *ENGINE, *more])


def read(folder: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    results = json.loads((folder / "results.json").read_text())
    rows = {f"{row['setup']}/{row['mode']}": row for row in results["rows"]}
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return rows, answers


def test_what_compressed_nothing_is_no_advice() -> None:
    recommend.check_compressed([{"kept": 1.0}, {"kept": 0.9}])
    with pytest.raises(ConfigError, match=r"nothing was compressed.*--kv-min-tokens \(256\)"):
        recommend.check_compressed([{"kept": 1.0}, {"kept": 1.0}])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    assert evaluate(folder) == 0
    return folder


def test_every_setup_and_mode_has_a_row(finished: Path) -> None:
    rows, answers = read(finished)
    assert set(rows) == {
        "full/query-aware",
        "adakv@0.25/query-agnostic",
        "adakv@0.25/query-aware",
    }
    assert len(answers) == 3 * SAMPLES * len(FAMILIES)
    full = rows["full/query-aware"]
    assert full["score"] >= 0.95
    assert full["agreement"] == 1.0
    assert full["kept"] == 1.0
    for name, row in rows.items():
        assert set(row["tasks"]) == {f"{family}@{LENGTH}" for family in FAMILIES}
        own = [a for a in answers if f"{a['setup']}/{a['mode']}" == name]
        for shown, measured in (
            ("first_token_ms", "first_token_seconds"),
            ("token_ms", "token_seconds"),
        ):
            milliseconds = [1000 * answer[measured] for answer in own]
            assert 0 < min(milliseconds) <= row[shown] <= max(milliseconds)


def test_prepared_contexts_have_a_row(tmp_path: Path) -> None:
    """Questions begin with them; what they hold is what the preparation has kept."""
    assert evaluate(tmp_path, "--mode", "prepared", "--concurrency", "2", samples=1) == 0
    rows, answers = read(tmp_path)
    assert set(rows) == {"full/query-aware", "adakv@0.25/prepared"}
    assert rows["adakv@0.25/prepared"]["kept"] < 0.5
    for answer in answers:
        if answer["setup"] != "full":
            num_blocks = answer["cached_tokens"] // BLOCK
            assert num_blocks == LENGTH // BLOCK
            (tokens,) = {sum(layer) / len(layer) for layer in answer["kept_tokens"]}
            assert tokens == -(-num_blocks // 4) * BLOCK


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policies", "momentkv"], "momentkv merges evicted tokens"),
        (["--kv-trigger", "decode:64"], "no context is compressed"),
        (["--base-url", "http://127.0.0.1:1"], "expected no --base-url"),
    ],
)
def test_what_prepares_nothing_is_refused(tmp_path: Path, more: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    eval_command.add_options(parser)
    options = ["--tasks", "text/tables", "--out", str(tmp_path), "--mode", "prepared"]
    with pytest.raises(ConfigError, match=message):
        eval_command.plan_of(parser.parse_args([MODEL, *options, *more]))


def test_ways_of_reading_are_compared_in_the_same_table(finished: Path, tmp_path: Path) -> None:
    """The run goes on with one more setup, which holds everything: one mode, and other answers;
    and with one that reads a part of what a policy keeps."""
    folder = tmp_path / "more"
    shutil.copytree(finished, folder)
    setup, both = "quest:0.1,global=0,local=0", "snapkv@0.5 quest:0.4,global=0,local=0"
    assert evaluate(folder, "--kv-read", setup, "--kv-read", both) == 0
    rows, answers = read(folder)
    assert len(rows) == 6
    row = rows[f"{setup}/query-aware"]
    num_pages = -(-(1 + LENGTH + 3) // BLOCK)
    assert row["kept"] == 1.0
    assert row["read"] == pytest.approx(2 / num_pages)
    assert row["agreement"] < 1
    full = {a["item"]: a["tokens"][0] for a in answers if a["setup"] == "full"}
    read_less = {a["item"]: a["tokens"][0] for a in answers if a["setup"] == setup}
    assert read_less == full, "the first token comes from the prompt, which is read whole"
    row = rows[f"{both}/query-aware"]
    kept = 8 * BLOCK + (1 + LENGTH + 3) % BLOCK
    assert row["kept"] == pytest.approx(kept / (1 + LENGTH + 3))
    assert row["read"] == pytest.approx(4 / 9 * row["kept"])
    assert rows[f"{both}/query-agnostic"]["agreement"] < 1


def test_a_quarter_of_the_blocks_is_resident(finished: Path) -> None:
    """Query-agnostic, only the context's full blocks were compressed: the question stays."""
    rows, answers = read(finished)
    for answer in answers:
        if answer["setup"] == "full":
            assert answer["resident_tokens"] == answer["prompt_tokens"]
            # keys and values of 4 layers, 4 heads of 32
            size = getattr(torch, DTYPE).itemsize
            assert answer["resident_bytes"] == answer["prompt_tokens"] * 2 * 4 * 4 * 32 * size
            continue
        agnostic = answer["mode"] == "query-agnostic"
        # <bos>, the context; and behind it the question of two words, and <answer>
        assert answer["prompt_tokens"] == 1 + LENGTH + 3
        compressed = (LENGTH + 1 if agnostic else answer["prompt_tokens"]) // BLOCK * BLOCK
        kept = -(-compressed // BLOCK // 4) * BLOCK
        tail = answer["prompt_tokens"] - compressed
        assert answer["resident_tokens"] == pytest.approx(kept + tail)
        assert len(answer["kept_tokens"]) == 4
        assert {len(heads) for heads in answer["kept_tokens"]} == {4}
    heads = rows["adakv@0.25/query-aware"]["kept_tokens"]
    assert len({round(tokens) for layer in heads for tokens in layer}) > 1, "adakv is not uniform"


def test_what_a_policy_carries_is_resident(tmp_path: Path) -> None:
    """MomentKV's moments take pages of the same blocks that eviction alone would leave."""
    arguments = ["eval", MODEL, *questions(tmp_path / "asked", FAMILIES[:1], 1)]
    arguments += ["--policies", "momentkv", "--budgets", "0.25", "--mode", "aware", *ENGINE]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    answer = next(a for a in read(tmp_path)[1] if a["setup"] != "full")
    full_blocks, tail = divmod(answer["prompt_tokens"], BLOCK)
    assert answer["resident_tokens"] == -(-full_blocks // 4) * BLOCK + tail
    kept = [tokens for layer in answer["kept_tokens"] for tokens in layer]
    assert sum(kept) / len(kept) + tail < answer["resident_tokens"]


def test_a_run_that_was_killed_goes_on(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers that were there stay as they are, the cut-off line is asked again.

    The rest is asked four at a time, and each answer says what its own request has kept.
    """
    lines = (finished / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "plan.json").write_bytes((finished / "plan.json").read_bytes())
    (tmp_path / "answers.jsonl").write_text("".join(lines[:14]) + lines[14][:40])
    assert evaluate(tmp_path, "--concurrency", "4") == 0
    assert "adakv@0.25" in capsys.readouterr().out
    _, before = read(finished)
    _, after = read(tmp_path)
    assert after[:14] == before[:14]

    def said(answers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(a["setup"], a["mode"], a["item"], a["tokens"], a["score"]) for a in answers]

    assert said(after) == said(before)
    for answer, alone in zip(after, before, strict=True):
        assert answer["resident_tokens"] == pytest.approx(alone["resident_tokens"])
    pairs = list(zip(after[14:], before[14:], strict=True))
    same = sum(answer["kept_tokens"] == alone["kept_tokens"] for answer, alone in pairs)
    assert same > 0.7 * len(pairs), "bfloat16 sums differ in a batch, and so may a head's pages"


def test_a_finished_run_starts_no_engine(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that asks for less, and it shows what was asked for only."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    monkeypatch.delattr(runner, "Engine")
    assert evaluate(folder) == 0
    assert read(folder) == read(finished)
    assert evaluate(folder, "--mode", "agnostic") == 0
    assert set(read(folder)[0]) == {"full/query-aware", "adakv@0.25/query-agnostic"}


def test_a_running_server_answers_like_an_engine(finished: Path, tmp_path: Path) -> None:
    """The same questions at the same settings: the same words, and as much resident."""
    arguments = ["serve", MODEL, "--served-model-name", "reference", "--enforce-eager"]
    arguments += ["--dtype", DTYPE]
    arguments += ["--kv-policy", "adakv", "--kv-budget", "0.25"]
    with serving(OUR_SERVE, arguments, tmp_path / "server.log") as address:
        folder = tmp_path / "out"
        assert evaluate(folder, "--base-url", address, "--served-name", "reference") == 0
    rows, answers = read(folder)
    assert set(rows) == {"server/query-aware", "server/query-agnostic"}
    assert rows["server/query-aware"]["agreement"] is None
    expected = {(a["mode"], a["item"]): a for a in read(finished)[1] if a["setup"] != "full"}
    assert len(answers) == len(expected)
    for answer in answers:
        engine = expected[answer["mode"], answer["item"]]
        assert answer["text"].split() == engine["text"].split()
        assert answer["resident_tokens"] == pytest.approx(engine["resident_tokens"])
        assert answer["prompt_tokens"] == engine["prompt_tokens"]
        assert len(answer["tokens"]) >= len(answer["text"].split())
        assert answer["first_token_seconds"] > 0
        assert answer["token_seconds"] > 0


def test_a_server_that_is_not_there_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path, "--base-url", "http://127.0.0.1:9") == 1
    assert "is it a vLLM server?" in capsys.readouterr().err


def test_answers_to_other_questions_are_not_mixed(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(finished, samples=SAMPLES + 1) == 2
    assert "holds answers of another evaluation (other questions)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "", "--policies", "snapkv"], "nothing to ask"),
        (["--tasks", "ruler", "--policies", "snapvk"], "snapvk"),
        (["--tasks", "ruler", "--budgets", "0"], "expected a budget: a fraction"),
        (["--tasks", "ruler", "--budgets", "0.5,0.5"], "remove the doubles"),
        (["--tasks", "ruler", "--concurrency", "0"], "--concurrency 0: expected at least 1"),
        (["--tasks", "ruler", "--lengths", "many"], "expected numbers of tokens"),
        (["--tasks", "ruler", "--kv-param", "windw_size=8"], "windw_size"),
    ],
)
def test_what_cannot_work_is_refused_before_any_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["eval", MODEL, "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("loss", ["2", "100%", "-1%", "some"])
def test_a_permitted_loss_is_a_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    with pytest.raises(SystemExit):
        main(["recommend", MODEL, "--out", str(tmp_path), f"--max-loss={loss}"])
    expected = f"argument --max-loss: expected a share such as 1% or 0.01, found {loss}"
    assert expected in capsys.readouterr().err


def test_longbench_s_files_are_asked(tmp_path: Path) -> None:
    """A context that is too long for the model is cut in the middle, so that it fits."""
    row = {"input": "Who?", "answers": ["City"], "all_classes": ["City", "State"], "length": 900}
    row["context"] = "k1 v2 w3 . " * 225
    (tmp_path / "trec.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["eval", MODEL, "--tasks", "longbench/trec", "--longbench-data", str(tmp_path)]
    arguments += ["--policies", "full", "--engine", "enforce_eager=true"]
    arguments += ["--engine", "max_model_len=256", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    rows, (answer,) = read(tmp_path / "out")
    assert rows["full/query-aware"]["tasks"] == {"longbench/trec": 0.0}
    assert 256 - 64 - 1 <= answer["prompt_tokens"] <= 256 - 64


def test_a_model_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert main(["eval", missing, "--tasks", "ruler", "--out", str(tmp_path / "out")]) == 2
    assert "no tokenizer could be loaded" in capsys.readouterr().err


def test_an_engine_that_ends_is_reported(tmp_path: Path) -> None:
    """Killed between two questions; what it printed goes into the error."""
    log = tmp_path / "engine.log"
    options = {"enforce_eager": True, "max_model_len": 512}
    with Engine(MODEL, None, options, log) as engine:
        question = Question(context=[1, 5, 6], question=[4], max_tokens=2, agnostic=False)
        assert len(engine.ask(question)[0].tokens) == 2
        engine._process.kill()
        engine._process.join()
        with pytest.raises(EngineError, match="the engine ended"):
            engine.ask(question)


def test_an_engine_that_does_not_start_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path, "--engine", "max_model_len=999999") == 1
    assert "the engine ended" in capsys.readouterr().err


def test_options_of_engines_are_those_of_servers() -> None:
    """vLLM's own parser reads them."""
    given = {"enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 3}
    given |= {"hf_overrides": {"rope_theta": 10}, "kv_cache_dtype": "auto"}
    command = ["serve", MODEL, *recommend.engine_flags(given)]
    _, parsed = launch.parse(command)
    assert {name: getattr(parsed, name) for name in given} == given


def test_a_recommendation_is_a_command(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With any loss allowed the first budget, which has answers, is enough; no other is tried."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "report.html").unlink()
    monkeypatch.delattr(runner, "Engine")
    arguments = ["recommend", MODEL, *questions(tmp_path / "asked")]
    arguments += ["--policies", "adakv", "--budgets", "0.25,0.5"]
    arguments += ["--mode", "aware", "--max-loss", "99%", "--out", str(folder), *ENGINE]
    assert main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].strip() == (
        f"vllm-kvcompress serve {MODEL} --kv-policy adakv --kv-budget 0.25 "
        f"--enforce-eager --max-model-len 2048 --dtype {DTYPE}"
    )
    rows, _ = read(folder)
    assert set(rows) == {"full/query-aware", "adakv@0.25/query-aware"}
    assert (folder / "report.html").exists()
