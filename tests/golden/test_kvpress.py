"""Our policies against kvpress 0.5.5 on the same keys, values and queries.

The stored answers were made by scripts/release/kvpress_golden.py. Where both define a policy alike,
both keep the same entries; docs/kvpress.md lists where they differ, and the tests say so too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offline.gathered_kv import GatheredKV
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.base import LayerView

FOLDER = Path(__file__).parent
MODELS = ["llama", "qwen3", "reference"]
LAYERS = [0, 2]
NUM_TOKENS, NUM_KEPT, WINDOW = 192, 48, 16

# kvpress pools over the mean, with its own widths; Knorm skips no layers there; its criticalkv
# counts the window into the first stage's half of the budget: 24 = 16 + a quarter of the other 32.
SNAPKV = {"window_size": WINDOW, "kernel_size": 5, "pooling": "mean"}
L1: dict[str, Any] = {**SNAPKV, "norm": "l1"}
SAME: dict[str, dict[str, Any]] = {
    "streamingllm": {},
    "knorm": {"skip_layers": 0},
    "keydiff": {},
    "tova": {},
    "expected": {"window_size": NUM_TOKENS, "n_future_positions": 64, "epsilon": 1e-3},
    "snapkv": SNAPKV,
    "adakv": {**SNAPKV, "safeguard": 0.0},
    "snapkv+criticalkv": L1 | {"alpha": 0.25},
}


@pytest.fixture(scope="module", params=MODELS)
def stored(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{request.param}.safetensors")


def view_of(stored: dict[str, Tensor], layer: int, num_queries: int) -> LayerView:
    """Returns a view with pages of one token, so that budgets are exact."""
    keys, values = stored[f"{layer}.keys"], stored[f"{layer}.values"]
    queries, o_proj = stored[f"{layer}.queries"], stored[f"{layer}.o_proj"]
    num_heads, _, size = keys.shape
    group = queries.shape[1] // num_heads
    weight = o_proj.t().reshape(num_heads, group, size, -1).transpose(1, 2)
    return LayerView(
        kv=GatheredKV.of(keys, values),
        queries=queries[queries.shape[0] - num_queries :],
        scale=size**-0.5,
        layers=range(layer, layer + 1),
        block_size=1,
        output_weight=weight,
        rotary=Rotary(stored[f"{layer}.frequencies"]),
    )


def ours(stored: dict[str, Tensor], layer: int, policy: str, params: dict[str, Any]) -> Any:
    """Returns [H, n] scores and kept entries of our pipeline."""
    num_heads = stored[f"{layer}.keys"].shape[0]
    pipeline = resolve(policy, params).bind(4, num_heads, num_heads, block_size=1)
    view = view_of(stored, layer, pipeline.needs.window_size)
    selection = compress_layer(pipeline, view, NUM_KEPT * num_heads)
    mask = torch.zeros(num_heads, NUM_TOKENS, dtype=torch.bool)
    heads = torch.repeat_interleave(selection.page_counts)
    mask[heads, selection.kept_indices] = True
    return pipeline.scorer.score(view), mask


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("policy", list(SAME))
def test_policies_keep_the_entries_that_kvpress_keeps(
    stored: dict[str, Tensor], layer: int, policy: str
) -> None:
    """Entries that only one side keeps have scores equal up to rounding."""
    _, our_result = ours(stored, layer, policy, SAME[policy])
    theirs, scores = stored[f"{layer}.{policy}.kept"], stored[f"{layer}.{policy}.scores"]
    assert int(our_result.sum()) == int(theirs.sum())
    different = our_result != theirs
    if policy == "tova":  # kvpress keeps the last token whatever its score
        assert (different.sum(dim=1) <= 2).all()
        assert not (theirs & ~our_result)[:, :-1].any()
    elif different.any():
        spread = scores[different].max() - scores[different].min()
        assert spread <= 1e-5 * scores[different].abs().max(), int(different.sum())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("policy", "unscored"),
    [("knorm", 0), ("keydiff", 0), ("tova", 1), ("snapkv", WINDOW), ("expected", 0)],
)
def test_policies_have_the_scores_of_kvpress(
    stored: dict[str, Tensor], layer: int, policy: str, unscored: int
) -> None:
    """Except for the last tokens, which kvpress always keeps without a score."""
    our_result, _ = ours(stored, layer, policy, SAME[policy])
    theirs = stored[f"{layer}.{policy}.scores"]
    begin = 4 if policy == "expected" else 0  # sinks, to which kvpress gives the highest score
    end = NUM_TOKENS - unscored
    assert torch.allclose(our_result[:, begin:end], theirs[:, begin:end], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_adakv_with_criticalkv_divides_budgets_alike(stored: dict[str, Tensor], layer: int) -> None:
    """Every head has the same budget; within it the first stage differs by the window's share.

    kvpress takes half of a head's whole budget, window included; we half of what the window
    leaves, as the paper has it. At most half of the window can differ, on either side.
    """
    _, our_result = ours(stored, layer, "adakv+criticalkv", L1 | {"safeguard": 0.0})
    theirs = stored[f"{layer}.adakv+criticalkv.kept"]
    assert our_result.sum(dim=1).tolist() == theirs.sum(dim=1).tolist()
    assert ((our_result & ~theirs).sum(dim=1) <= WINDOW // 2).all()
