"""`plan --requests` names the budget and type of cache that fit and lost the least."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kvcompress.cli import plan
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.tools.combinations import BUDGETS, LOSSES, MODELS, Combination

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "memory.md"
KEPT = {"all": 1.0, "a half": 0.5, "a quarter": 0.25, "a tenth": 0.1}
SIXTEEN_BITS = "16 bits"
CPU_TYPES = ("auto", "fp8")  # with AVX-512
# 40 GiB of cache on a GPU.
ON_A_GPU = ["--gpu-memory=40GiB", "--gpu-memory-utilization=1", "--weights-memory=0"]
ON_A_GPU += ["--other-memory=0"]


def rows_of(out: str) -> list[list[str]]:
    """The printed table: losses, KiB per token, requests, options."""
    lines = [line.split(maxsplit=4) for line in out.splitlines() if "--kv-cache-dtype" in line]
    return [line for line in lines if len(line) == 5]


def test_losses_are_those_that_were_measured() -> None:
    """The page's rows: type, tokens kept, and for each model bytes and loss (standard error).

    With all tokens, `serve` without a policy is stock vLLM, which stores Qwen's keys whole: a table
    of its own, without fp8.
    """
    page: dict[tuple[str, float], list[float | None]] = {}
    for line in MEASURED.read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) != 2 + 2 * len(MODELS) or cells[1] not in KEPT:
            continue
        name = cells[0].partition(",")[0].strip("`").replace(SIXTEEN_BITS, "auto")
        losses = [cell.partition(" (")[0].strip("*") for cell in cells[3::2]]
        page[name, KEPT[cells[1]]] = [float(loss) if loss else None for loss in losses]
    text, biased = MEASURED.read_text(), MODELS.index("Qwen2.5-Coder 1.5B")
    assert all(model in text for model in MODELS)
    page["fp8", 1.0][biased] = None
    for line in text.partition("## Keys with a bias")[2].splitlines():
        if line.startswith("| `"):
            name, whole, _ = (cell.strip(" `") for cell in line.strip("|").split("|"))
            page[name, 1.0][biased] = float(whole.partition(" (")[0])
    for name, by_model in LOSSES.items():
        for number, budget in enumerate(BUDGETS):
            expected = page.pop((name, budget), [0.0, 0.0])  # the full cache is what others lose to
            assert [losses[number] for losses in by_model] == expected, (name, budget)
    assert not page


@pytest.mark.parametrize(
    ("num_requests", "first", "absent"),
    [
        (4, "--kv-cache-dtype auto", None),
        (16, "--kv-cache-dtype auto --kv-policy auto --kv-budget 0.5", "--kv-cache-dtype auto"),
        (
            60,
            "--kv-cache-dtype fp8 --kv-policy auto --kv-budget 0.25",
            "--kv-cache-dtype auto --kv-policy auto --kv-budget 0.5",
        ),
    ],
)
def test_the_least_loss_that_fits_comes_first(
    llama_8b: str,
    capsys: pytest.CaptureFixture[str],
    num_requests: int,
    first: str,
    absent: str | None,
) -> None:
    """32,768 tokens, 4 GiB each in 16 bits, are to fit 40 GiB."""
    command = ["plan", llama_8b, *ON_A_GPU, "--context=32k", f"--requests={num_requests}"]
    assert main(command) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert rows[0][4] == first
    assert all(float(requests) >= num_requests for *_, requests, _ in rows)
    losses = [max(float(row[0]), float(row[1])) for row in rows if "-" not in row[:2]]
    assert losses == sorted(losses)
    assert absent not in [row[4] for row in rows]
    assert "not on this model" in out


def test_bytes_per_token_and_what_is_worse_in_every_respect(
    llama_8b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key of 128 numbers: 256 bytes in 16 bits, 132 in int8; four bits lose more and hold less
    than a quarter in 16 bits.
    """
    assert main(["plan", llama_8b, *ON_A_GPU, "--context=32k", "--requests=16"]) == 0
    rows = {row[4]: row for row in rows_of(capsys.readouterr().out)}
    bits = 2 * 32 * 8 / 1024  # keys and values of all layers and heads
    half = rows["--kv-cache-dtype auto --kv-policy auto --kv-budget 0.5"]
    assert float(half[2]) == pytest.approx(0.5 * 256 * bits, abs=0.05)
    int8 = rows["--kv-cache-dtype int8_per_token_head --kv-policy auto --kv-budget 0.25"]
    assert float(int8[2]) == pytest.approx(0.25 * 132 * bits, abs=0.05)
    assert "--kv-cache-dtype int4_per_token_head" not in rows


@pytest.mark.parametrize("types", [CPU_TYPES, ("auto",)])
def test_cpus_are_offered_only_what_their_attention_serves(
    llama_8b: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    types: tuple[str, ...],
) -> None:
    """And not fp8 without a policy, which was not measured on both models and loses more."""
    monkeypatch.setattr(plan, "is_cpu_build", lambda: True)
    monkeypatch.setattr(
        "vllm_kvcompress.vllm_plugin.compat.config.reason_against_cpu_cache",
        lambda name, *_: None if name in types else "says vLLM",
    )
    command = ["plan", llama_8b, "--kv-cache-memory=40GiB", "--context=32k", "--requests=16"]
    assert main(command) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    names = [row[4].split()[1] for row in rows]
    assert set(names) == set(types)
    assert names[0] == "auto"
    assert "-" not in [row[1] for row in rows]
    assert "--kv-cache-dtype fp8" not in [row[4] for row in rows]
    assert f"for this CPU, which serves {', '.join(types)}; --gpu-memory" in out


def test_what_was_not_measured_in_both_models_is_ranked_last() -> None:
    row = ("fp8", 1.0, 1.0, 1.0)
    measured, partly = Combination(*row, losses=(0.5, 0.1)), Combination(*row, losses=(0.1, None))
    assert measured.rank < partly.rank


def test_no_combination_holds_so_many(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And what the command chooses cannot be given."""
    command = ["plan", llama_8b, *ON_A_GPU, "--context=32k", "--requests=5000"]
    assert main(command) == 0
    assert "do with --kv-cache-dtype int4_per_token_head" in capsys.readouterr().out
    assert main([*command, "--kv-policy", "auto", "--kv-budget", "0.5"]) == 2
    assert "leave out --kv-policy" in capsys.readouterr().err
