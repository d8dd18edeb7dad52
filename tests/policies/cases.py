"""Random caches for policy tests, and profile files that fit them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offline.gathered_kv import GatheredKV
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.value_norms import output_roots
from vllm_kvcompress.policies import Pipeline, resolve
from vllm_kvcompress.policies.base import EntryState, LayerView
from vllm_kvcompress.policies.triattention import write_statistics

HEAD_SIZE = 8
HIDDEN_SIZE = 24
NUM_LAYERS = 3

# Small windows, so that prompts of a few pages have something to select.
POLICIES: dict[str, dict[str, object]] = {
    "streamingllm": {},
    "knorm": {},
    "keydiff": {},
    "keydiff+window": {"recent_fraction": 0.3, "anchor": "mean_raw"},
    "keydiff+adakv": {"any_scores": "on"},
    "tova": {},
    "h2o": {"window_size": 9, "stride": 2},
    "snapkv": {"window_size": 5},
    "attention": {"window_size": 7, "num_recent": 3, "num_sinks": 2},
    "pyramidkv": {"window_size": 5, "beta": 3.0},
    "adakv": {"window_size": 5},
    "spans": {"window_size": 9, "near_size": 4, "num_after": 4, "num_before": 1, "num_sinks": 2},
    "keyspans": {
        "window_size": 9,
        "near_size": 4,
        "num_after": 3,
        "num_recent": 5,
        "key_weight": 2.0,
        "min_kept": 0.4,
    },
    "leverage": {},
    "rkv": {"window_size": 5, "threshold": 0.4},
    "triattention": {"max_distance": 9, "num_recent": 3},
    "expected": {"window_size": 9, "n_future_positions": 6, "n_sink": 2},
    "expected+adakv": {"window_size": 60, "n_future_positions": 3, "epsilon": 0.02},
    "headkv": {"window_size": 5},
    "attention+headkv": {"window_size": 7, "num_recent": 3, "num_sinks": 2},
    "spans+headkv": {"window_size": 9, "near_size": 4, "num_after": 3, "even_share": 0.4},
    "keyspans+headkv": {"window_size": 9, "near_size": 4, "num_recent": 3, "min_kept": 0.5},
    "keydiff+headkv": {},
    "duoattention": {},
    "snapkv+criticalkv": {"window_size": 5},
    "attention+criticalkv": {"window_size": 7, "num_recent": 3},
    "adakv+criticalkv": {"window_size": 5, "safeguard_mode": "floor", "norm": "l1"},
    "headkv+criticalkv": {"window_size": 5, "pooling": "mean", "alpha": 0.3},
    "pyramidkv+adakv": {"window_size": 5, "beta": 3.0},
    "h2o+adakv": {"window_size": 9, "normalize": "on", "stride": 1},
    "pyramidkv+adakv+criticalkv": {"window_size": 5, "beta": 3.0},
    "pyramidkv+criticalkv": {"window_size": 6, "kernel_size": 3, "norm": "l1"},
    "h2o+criticalkv": {"window_size": 9},
    "snapkv+obcache": {"window_size": 5},
    "h2o+obcache": {"window_size": 9, "variant": "key"},
    "d2o": {"window_size": 9, "num_sinks": 2, "stride": 3},
    "streamingllm+cam": {"num_targets": 5, "merge_window": 9},
    "h2o+cam": {"window_size": 9, "num_targets": 5, "merge_window": 9, "draw": "expected"},
    "kvmerger": {"window_size": 9, "max_set": 15, "sizes": "heads", "threshold": 0.1},
    "asymkv": {"window_size": 9, "num_sinks": 3},
    "kvslimmer": {"window_size": 9, "num_sinks": 3, "variant": "code", "running": "on"},
    "momentkv": {"window_size": 5},
    "snapkv+momentfix": {"window_size": 5},
    "pyramidkv+adakv+momentfix": {"window_size": 5, "beta": 3.0},
}


@dataclass(frozen=True)
class Shape:
    """A layer of one request.

    Attributes:
        pages: pages of each KV head.
        tail: tokens in the partial last block.
        block_size: tokens of a page.
        group: query heads per KV head.
        layer: which layer.
        seed: of the numbers.
    """

    pages: tuple[int, ...]
    tail: int = 0
    block_size: int = 4
    group: int = 2
    layer: int = 1
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        return [count * self.block_size for count in self.pages]


def make_view(shape: Shape, num_queries: int, dtype: torch.dtype = torch.float32) -> LayerView:
    """Random keys, values and queries; padding is NaN, so that reading it shows."""
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    num_heads, width = len(shape.pages), max(shape.lengths)
    keys, values = normal(num_heads, width, HEAD_SIZE), normal(num_heads, width, HEAD_SIZE)
    for head, length in enumerate(shape.lengths):
        keys[head, length:] = values[head, length:] = float("nan")
    weight = normal(num_heads, HEAD_SIZE, shape.group, HIDDEN_SIZE)
    by_query_head = weight.transpose(1, 2).flatten(0, 1)
    # More queries than tokens cannot have been asked.
    num_queries = min(num_queries, width + shape.tail)
    tail_keys, tail_values = normal(2, num_heads, shape.tail, HEAD_SIZE).to(dtype)
    rows, tail = (keys.to(dtype), values.to(dtype)), (tail_keys, tail_values)
    return LayerView(
        kv=GatheredKV(torch.tensor(shape.lengths), rows, tail),
        queries=(2 * normal(num_queries, num_heads * shape.group, HEAD_SIZE)).to(dtype),
        scale=HEAD_SIZE**-0.5,
        layers=range(shape.layer, shape.layer + 1),
        block_size=shape.block_size,
        output_weight=weight.to(dtype),
        output_root=output_roots(by_query_head).to(dtype),
        ends=(width + shape.tail,),
        rotary=Rotary(torch.tensor([1.0, 0.3, 0.05])),
        entries=EntryState(positions=torch.arange(width).expand(num_heads, -1)),
    )


def with_state(view: LayerView, **tensors: torch.Tensor | None) -> LayerView:
    """The same view with other policy state of its entries."""
    return replace(view, entries=replace(view.entries, **tensors))


def with_rows(
    view: LayerView,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
    lengths: torch.Tensor | None = None,
) -> LayerView:
    """The same view with other keys or values."""
    kv = view.kv
    rows = (kv.keys() if keys is None else keys, kv.values() if values is None else values)
    tail = tail or (kv.tail_keys(), kv.tail_values())
    return replace(view, kv=GatheredKV(view.lengths if lengths is None else lengths, rows, tail))


def headkv_scores(num_layers: int, num_heads: int) -> list[list[list[float]]]:
    """Scores that differ from head to head, two per head."""
    generator = torch.Generator().manual_seed(7)
    return torch.rand(num_layers, num_heads, 2, generator=generator).tolist()  # type: ignore[no-any-return]


def headkv_file(directory: Path, num_layers: int, num_heads: int) -> Path:
    """A profile of such scores."""
    scores = headkv_scores(num_layers, num_heads)
    rows = {f"{la}-{h}": scores[la][h] for la in range(num_layers) for h in range(num_heads)}
    path = directory / "headkv.json"
    path.write_text(json.dumps(rows))
    return path


def duoattention_file(
    directory: Path, num_layers: int, num_heads: int, sinks: int = 2, recent: int = 5
) -> Path:
    """Gates that differ from head to head."""
    gates = torch.rand(num_layers, num_heads, generator=torch.Generator().manual_seed(8)).tolist()
    path = directory / "full_attention_heads.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in gates) + "\n")
    (directory / "config.json").write_text(json.dumps({"sink_size": sinks, "recent_size": recent}))
    return path


def triattention_statistics(num_layers: int, num_heads: int) -> torch.Tensor:
    """Statistics of queries that differ from head to head; magnitudes exceed those of the mean."""
    generator = torch.Generator().manual_seed(9)
    mean = torch.randn(num_layers, num_heads, 2, HEAD_SIZE // 2, generator=generator)
    more = torch.rand(num_layers, num_heads, 1, HEAD_SIZE // 2, generator=generator)
    return torch.cat([mean, mean.norm(dim=2, keepdim=True) + more], dim=2)


def triattention_file(directory: Path, num_layers: int, num_heads: int) -> Path:
    """A profile of such statistics."""
    path = directory / "queries.pt"
    write_statistics(path, triattention_statistics(num_layers, num_heads))
    return path


def make_pipeline(policy: str, shape: Shape, directory: Path, **params: object) -> Pipeline:
    """Builds a policy of `POLICIES` with its parameters, bound to the shape's model."""
    num_heads = len(shape.pages)
    profile = None
    if "headkv" in policy.split("+"):
        profile = headkv_file(directory, NUM_LAYERS, num_heads * shape.group)
    elif policy.startswith("duoattention"):
        profile = duoattention_file(directory, NUM_LAYERS, num_heads)
    elif policy.startswith("triattention"):
        profile = triattention_file(directory, NUM_LAYERS, num_heads * shape.group)
    pipeline = resolve(policy, {**POLICIES.get(policy, {}), **params}, profile)
    return pipeline.bind(NUM_LAYERS, num_heads, num_heads * shape.group, shape.block_size)


def rows_of(kept: torch.Tensor, counts: Sequence[int], block_size: int) -> list[list[int]]:
    """Splits a selection's flat indices by head."""
    return [part.tolist() for part in kept.split([count * block_size for count in counts])]
