"""A cache in fp8 on the path for GPUs: vLLM's Triton attention, queries of the model's type."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import check_as_alone, each_alone, request
from tests.engine.fp8_kernels import SCALES
from tests.engine.oracle import BLOCK, follow, kept_positions
from tests.engine.test_fp8_cache import PROBES, Fp8Decoder
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

TORCH = {"kernels": "torch", "settings": {"policy": "adakv+criticalkv", "budget": 0.25}}
INTERPRETED = {"kernels": "triton", "settings": {"policy": "keydiff", "budget": 0.25}}
FP8 = {"kv_cache_dtype": "fp8", "probes": [f"{PROBES}scales", f"{PROBES}writes_fp8"]}


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "how"), [(500, 40, TORCH), (130, 3, INTERPRETED)]
)
def test_decoding_matches_dense_attention_over_the_kept_numbers(
    llama: str, run_gpu_path: Run, num_tokens: int, max_tokens: int, how: dict[str, Any]
) -> None:
    """Queries are not in fp8. Once with vLLM's own attention kernel, interpreted."""
    tokens = prompt(num_tokens, seed=1)
    phases = [[request("a", tokens, max_tokens)]]
    report = run_gpu_path(llama, phases, record_kept=True, **FP8, **how)
    output, kept = report["outputs"]["a"], kept_positions(report["kept"], len(report["kept"]))
    full = len(tokens) // BLOCK * BLOCK
    follow(Fp8Decoder(llama, tokens, kept, full, name="fp8", scales=SCALES, cuts=False), output)


def test_a_request_in_a_batch_is_a_request_alone(llama: str, run_gpu_path: Run) -> None:
    """In the debug mode, scheduled ahead, compressed again while it generates."""
    requests = [request(f"r{i}", prompt(150 + 60 * i, seed=i), 24, at_step=i) for i in range(3)]
    report = run_gpu_path(
        llama,
        [requests, *each_alone(requests)],
        settings={"policy": "h2o", "budget": 0.3, "trigger": "prompt,decode:8"},
        environment={"KVCOMPRESS_CHECK": "1"},
        **FP8,
    )
    assert len(report["events"]) >= 6
    check_as_alone(report["outputs"], ("r0", "r1", "r2"))
