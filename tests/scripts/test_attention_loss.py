"""What attention loses, against dictionaries of all tokens that were ever there."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

import attention_loss
import reference_questions
from attention_sums import AttentionLoss
from offline.gathered_kv import GatheredKV
from tests.cli.server_process import ROOT
from vllm_kvcompress.attention.batch import CompressedRows, ResidentBatch
from vllm_kvcompress.cache.page_order import known_packings
from vllm_kvcompress.cache.pages import PackedPagePool, PagePool
from vllm_kvcompress.kernels.merging.moments import moment_size
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.scheduling.plan import EventPlan

HEADS, GROUP, SIZE, DIM, TOKENS, HIDDEN = 2, 2, 4, 8, 19, 12
SCALE, QUERIES = 0.5, 3
CPU = torch.device("cpu")
FIRST_KEPT = [[0, 2, 5, 7], [1, 2, 3, 6]]  # of tokens 0..7
SECOND_KEPT = [[0, 5, 7, 8, 9, 12, 14, 15], [2, 6, 9, 13]]  # of what the first event left


def make_pool() -> PagePool:
    packing = known_packings(SIZE, DIM)[0]
    return PackedPagePool(
        pages=torch.full((64, 2 * SIZE * DIM), float("nan")),
        pages_per_block=HEADS,
        layer_offsets=torch.tensor([0]),
        num_heads=HEADS,
        block_size=SIZE,
        head_size=DIM,
        packings=(packing, packing),
    )


def run_event(
    loss: AttentionLoss,
    keys: torch.Tensor,
    values: torch.Tensor,
    sources: list[list[int]],
    kept: list[list[int]],
    plan: EventPlan,
    moments: torch.Tensor | None = None,
) -> None:
    """`sources` and `kept` are token numbers by head."""
    width = max(map(len, sources))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in sources])
    rows = torch.arange(HEADS)[:, None]
    view = LayerView(
        kv=GatheredKV.of(keys[rows, padded], keys[:, :0], torch.tensor(list(map(len, sources)))),
        queries=torch.zeros(0, HEADS * GROUP, DIM),
        scale=SCALE,
        layers=range(1),
        block_size=SIZE,
    )
    places = [sources[head].index(token) for head in range(HEADS) for token in kept[head]]
    counts = torch.tensor([len(row) // SIZE for row in kept])
    selection = Selection(counts, torch.tensor(places))
    loss.compress(plan, 0, 0, view, values[rows, padded], selection, moments)


def event_plan(first_block: int, end_block: int, resident: int) -> EventPlan:
    return EventPlan(
        request_id="r",
        group=0,
        policy="snapkv",
        trigger="prompt",
        position=end_block * SIZE,
        first_block=first_block,
        end_block=end_block,
        resident_blocks=resident,
        fresh_block_ids=(9,),
        window_size=0,
    )


def test_the_engine_loses_what_evicted_tokens_would_have_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By layer and query head; where all weight is on resident tokens, the engine is exact."""
    model = str(ROOT / "models" / "reference")
    lines = [json.dumps(line) for line in reference_questions.rows("single", 512, 2)]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    options = ["--data", str(tmp_path / "asked.jsonl"), "--policies", "adakv,momentkv"]
    options += ["--budgets", "0.25", "--out", str(tmp_path), "--engine", "enforce_eager=true"]
    options += ["--engine", "max_model_len=1024", "--engine", "dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["attention_loss.py", model, *options])
    attention_loss.main()
    assert "| `adakv@0.25` | query-agnostic |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "loss.json").read_text())
    assert [(row["setup"], row["questions"]) for row in rows] == [
        *[("adakv@0.25", 2)] * 2,
        *[("momentkv@0.25", 2)] * 2,
    ]
    exact = 0
    for row in rows:
        heads = row["heads"]
        figures = {"error", "mass", "gap_cosine", "key_cosine", "projected_error"}
        assert set(heads) == figures | (
            {"estimate_cosine"} if "momentkv" in row["setup"] else set()
        )
        for name in ("error", "mass", "projected_error"):
            assert [len(layer) for layer in heads[name]] == [8] * 4
        assert all(lost > 0 for layer in heads["projected_error"] for lost in layer)
        for error, mass in zip(chain(*heads["error"]), chain(*heads["mass"]), strict=True):
            assert 0 < mass <= 1.00001
            if mass > 0.9999 and row["setup"].startswith("adakv"):
                exact += 1
                assert error < 0.001
        assert 0.3 < fmean(chain(*heads["mass"])) < 1
        assert 0 < fmean(chain(*heads["error"])) < 1
    assert exact > 3


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_losses_are_those_of_plain_loops(softcap: float) -> None:
    """Two events, the second of which evicts of what the first kept; then a chunk of queries."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, TOKENS, DIM)
    queries, outputs = torch.randn(2, QUERIES, HEADS * GROUP, DIM)
    weight = torch.randn(HEADS * GROUP, DIM, HIDDEN)
    moments = torch.randn(HEADS, moment_size(DIM))
    loss = AttentionLoss(make_pool(), softcap, [weight])
    everything = [list(range(8))] * HEADS
    run_event(loss, keys, values, everything, FIRST_KEPT, event_plan(0, 2, 0))
    second = [row + list(range(8, 16)) for row in FIRST_KEPT]
    run_event(loss, keys, values, second, SECOND_KEPT, event_plan(2, 4, 1), moments)

    resident = [row + list(range(16, TOKENS)) for row in SECOND_KEPT]
    table = torch.zeros(1, HEADS, 3, dtype=torch.int32)
    for head, tokens in enumerate(resident):
        for page in range(math.ceil(len(tokens) / SIZE)):
            table[0, head, page] = number = 10 * (head + 1) + page
            some = tokens[page * SIZE : (page + 1) * SIZE]
            packed = loss.pool.pages[number].view(2, SIZE, DIM)
            packed[0, : len(some)], packed[1, : len(some)] = keys[head, some], values[head, some]
    batch = ResidentBatch(
        **vars(CompressedRows.of(np.array([-1, 0]), CPU)),
        page_table=table,
        seq_lens=torch.tensor([[len(row) for row in resident]], dtype=torch.int32),
        resident_offset=torch.zeros(1, 1, HEADS, dtype=torch.int32),
        same_in_all_layers=False,
    )
    # Another request's two tokens come first in the batch.
    pad = torch.full((2, HEADS * GROUP, DIM), float("nan"))
    starts, positions = torch.tensor([0, 2, 5]), torch.tensor([2, TOKENS])
    loss.observe(
        0, batch, starts, positions, torch.cat((pad, queries)), torch.cat((pad, outputs)), SCALE
    )

    found = {name: layers[0] for name, layers in loss.means().items()}
    for head in range(HEADS):
        cosines = [cosine(keys[head, t], keys[head, t + 1]) for t in range(7)]
        assert found["key_cosine"][head] == pytest.approx(sum(cosines) / 7, rel=1e-4)
    for number in range(HEADS * GROUP):
        head = number // GROUP
        expected = dict.fromkeys(found.keys() - {"key_cosine"}, 0.0)
        for index in range(QUERIES):
            query, output = queries[index, number].tolist(), outputs[index, number].tolist()
            weights = {}
            for token in range(TOKENS - QUERIES + index + 1):
                dot = sum(a * b for a, b in zip(query, keys[head, token].tolist(), strict=True))
                logit = SCALE * dot
                weights[token] = math.exp(
                    softcap * math.tanh(logit / softcap) if softcap else logit
                )
            evicted = {t: w for t, w in weights.items() if t not in resident[head]}
            kept = {t: w for t, w in weights.items() if t in resident[head]}
            exact = mean_of(values[head], weights)
            wrong = [o - e for o, e in zip(output, exact, strict=True)]
            count, *rest = moments[head].tolist()
            cross = [rest[2 * DIM + DIM * row : 2 * DIM + DIM * (row + 1)] for row in range(DIM)]
            estimate = [
                rest[DIM + row] + SCALE / max(count, 1) * sum(map(float.__mul__, cross[row], query))
                for row in range(DIM)
            ]
            lost = mean_of(values[head], evicted)
            figures = {
                "error": math.hypot(*wrong) / math.hypot(*exact),
                "mass": sum(kept.values()) / sum(weights.values()),
                "projected_error": sum(
                    abs(sum(wrong[d] * float(weight[number, d, out]) for d in range(DIM)))
                    for out in range(HIDDEN)
                ),
                "gap_cosine": cosine(mean_of(values[head], kept), lost),
                "estimate_cosine": cosine(estimate, lost),
            }
            for name, figure in figures.items():
                expected[name] += figure / QUERIES
        for name, figure in expected.items():
            assert found[name][number] == pytest.approx(figure, rel=1e-3, abs=1e-4), name


def mean_of(values: torch.Tensor, weights: dict[int, float]) -> list[float]:
    total = sum(weights.values())
    return [
        sum(weight * float(values[token, dim]) for token, weight in weights.items()) / total
        for dim in range(DIM)
    ]


def cosine(one: Sequence[float] | torch.Tensor, other: Sequence[float] | torch.Tensor) -> float:
    a, b = list(map(float, one)), list(map(float, other))
    return sum(map(float.__mul__, a, b)) / math.hypot(*a) / math.hypot(*b)


@pytest.mark.parametrize(
    ("given", "compilation"),
    [
        ({}, {"cudagraph_mode": "PIECEWISE"}),
        ({"compilation_config": 3}, {"mode": 3, "cudagraph_mode": "PIECEWISE"}),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, {"cudagraph_mode": "PIECEWISE"}),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"cudagraph_mode": "NONE"}),
    ],
)
def test_no_attention_is_in_a_graph_of_a_whole_step(
    given: dict[str, Any], compilation: dict[str, Any]
) -> None:
    options = attention_loss.engine_options({"enforce_eager": False, **given})
    assert options == {"enforce_eager": False, "compilation_config": compilation}
