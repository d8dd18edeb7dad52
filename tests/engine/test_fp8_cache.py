"""Compression of a cache in fp8, in the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import DynamicCache

from tests.engine import mean_keys
from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.engine.fp8_kernels import SCALES, stored
from tests.engine.oracle import BLOCK, KeptTokensDecoder, follow, kept_positions
from tests.tiny_models import prompt

PROBES = "tests.engine.fp8_kernels:"
VECTOR, TILES = [f"{PROBES}vector_kernels"], [f"{PROBES}tile_kernels"]


FP8 = {"kv_cache_dtype": "fp8", "probes": [*VECTOR, f"{PROBES}scales"]}
CHECKED = {"environment": {"KVCOMPRESS_CHECK": "1"}}


class Fp8Decoder(KeptTokensDecoder):
    """A decoder that reads every key and value after a round trip through fp8."""

    def __init__(
        self, *args: Any, name: str, scales: list[tuple[float, float]], cuts: bool = True
    ) -> None:
        self.name, self.scales, self.cuts = name, scales, cuts
        super().__init__(*args)

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = self.scales[layer]
        return (
            stored(keys, self.name, k_scale, self.cuts),
            stored(values, self.name, v_scale, self.cuts),
        )

    def cache(self) -> DynamicCache:
        decoder = self

        class Rounding(DynamicCache):
            def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any):
                return super().update(*decoder.stored(layer, keys, values), layer, *args, **kwargs)

        return Rounding()


@pytest.mark.parametrize(
    ("policy", "kernels", "name", "how"),
    [
        ("adakv+criticalkv", VECTOR, "fp8", {}),
        ("pyramidkv", TILES, "fp8_e4m3", {}),
        ("keydiff", TILES, "fp8_e5m2", {"max_num_batched_tokens": 256}),
    ],
)
def test_decoding_matches_dense_attention_over_the_kept_fp8_values(
    llama: str, run_engine: Run, policy: str, kernels: list[str], name: str, how: dict[str, Any]
) -> None:
    """Every generated token, past block boundaries; scales differ by layer."""
    tokens = prompt(500, seed=1)
    report = run_engine(
        llama,
        [[request("a", tokens, 40)]],
        settings={"policy": policy, "budget": 0.25},
        record_kept=True,
        kv_cache_dtype=name,
        probes=[*kernels, f"{PROBES}scales"],
        **how,
    )
    output, kept = report["outputs"]["a"], kept_positions(report["kept"], len(report["kept"]))
    full = len(tokens) // BLOCK * BLOCK
    follow(Fp8Decoder(llama, tokens, kept, full, name=name, scales=SCALES), output)


class LessTheMeanDecoder(mean_keys.LessTheMean, Fp8Decoder):
    """A decoder of keys that are stored less their mean."""


def test_keys_with_a_bias_are_stored_less_the_mean_key(
    model_directory: Path, run_engine: Run
) -> None:
    """Attention is that of whole keys, each rounded without the mean; stock rounds whole keys."""
    model, tokens = mean_keys.build(model_directory), prompt(500, seed=1)
    whole = request("whole", tokens, 12, xargs={"kv_budget": 1.0}, salt="whole")
    report = run_engine(
        model,
        [[request("quarter", tokens, 12)], [whole]],
        settings={
            **{"policy": "snapkv", "budget": 0.25},
            **{"min_request_budget": 0.25, "max_request_budget": 1.0},
        },
        record_kept=True,
        kv_cache_dtype="fp8",
        probes=VECTOR,
    )
    num_full = len(tokens) // BLOCK * BLOCK
    kept = {
        "quarter": kept_positions(report["kept"], len(report["kept"])),
        "whole": [[list(range(num_full))] * 2] * 3,
    }
    given = {"name": "fp8", "scales": [(1.0, 1.0)] * 3}
    LessTheMeanDecoder.means = mean_keys.mean_keys(model)
    for name, output in report["outputs"].items():
        context = model, tokens, kept[name], num_full
        follow(LessTheMeanDecoder(*context, **given), output, within=5e-3)
        with pytest.raises(AssertionError):
            follow(Fp8Decoder(*context, **given), output, within=5e-3)


WINDOW = {"policy": "snapkv", "budget": 0.3}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({**WINDOW, "trigger": "chunk:128,decode:8"}, {"max_num_batched_tokens": 256}),
        ({"policy": "none", "read": "quest:0.3"}, {}),
    ],
    ids=["chunks-and-decoding", "reading"],
)
def test_batched_requests_have_the_outputs_that_they_have_alone(
    llama: str, run_engine: Run, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """In the debug mode; two requests share a prefix."""
    shared = prompt(200, seed=1)
    requests = [
        request("a", [*shared, *prompt(100, seed=2)], 24),
        request("b", [*shared, *prompt(140, seed=3)], 24, at_step=3),
        request("c", prompt(90, seed=4), 24, at_step=4),
    ]
    phases = [requests, *each_alone(requests)]
    report = run_engine(llama, phases, settings=settings, **FP8, **CHECKED, **options)
    assert report["events"] or "read" in settings
    assert report["free_at_end"] == report["num_blocks"] - 1
    assert report["outputs"]["b"]["cached"] >= 96
    check_as_alone(report["outputs"], ("a", "b", "c"))


def test_memory_pressure_compresses_fp8_requests(llama: str, run_engine: Run) -> None:
    """The last queries, which are not in fp8, lie in the pool's blocks."""
    report = run_engine(
        llama,
        [[request(f"r{i}", prompt(200, seed=i), 60) for i in range(4)]],
        settings={"policy": "snapkv", "budget": 0.25, "trigger": "pressure:0.6"},
        num_gpu_blocks_override=44,
        max_model_len=300,
        **FP8,
        **CHECKED,
    )
    assert {event["trigger"] for event in report["events"]} == {"pressure"}
    assert [len(output["tokens"]) for output in report["outputs"].values()] == [60] * 4
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_budget_one_is_stock_vllm(llama: str, run_engine: Run) -> None:
    """With the same type of cache, token for token."""
    phases = [[request("a", prompt(300, seed=1), 24), request("b", prompt(90, seed=2), 24)]]
    stock = run_engine(llama, phases, **FP8)
    report = run_engine(llama, phases, settings={"policy": "adakv", "budget": 1.0}, **FP8)
    for name, expected in stock["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


def test_budget_of_a_quarter_in_fp8_holds_eight_times_as_much_as_bf16(
    llama: str, run_engine: Run
) -> None:
    """fp8 gives twice the blocks for the same memory, of which a quarter is held."""
    phases, same = [[request("a", prompt(1024, seed=1), 4)]], {"num_gpu_blocks_override": None}
    stock = run_engine(llama, phases, dtype="bfloat16", **same)
    report = run_engine(
        llama, phases, settings={"policy": "adakv", "budget": 0.25}, dtype="bfloat16", **same, **FP8
    )
    assert report["num_blocks"] == pytest.approx(2 * stock["num_blocks"], abs=1)
    generated = 1  # block, in either
    assert round(max(stock["usage"]) * (stock["num_blocks"] - 1)) == 32 + generated
    assert [step["a"] for step in report["held"] if step][-1] == 8 + generated
