"""Cache groups of a draft model's layers: in blocks as large as the model's, of more tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.config import kv_cache_groups
from vllm_kvcompress.vllm_plugin.scheduler_side import block_manager  # noqa: F401  registers specs
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    DraftAttentionSpec,
    with_draft_layers,
)

SETTINGS = Settings.from_dict({"policy": "adakv", "budget": 0.25})
SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)


def compressed(num_heads: int = 2, block_size: int = 32) -> CompressedAttentionSpec:
    """Returns the spec of a compressed layer."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_heads, head_size=32, dtype=torch.float32
    )
    return CompressedAttentionSpec.from_full_attention(spec, SETTINGS, ())


def layers(num_layers: int, num_draft_layers: int, draft: CompressedAttentionSpec) -> dict:
    """Returns specs of both models' layers, as a model runner lists them."""
    specs = {f"model.{i}": compressed() for i in range(num_layers)}
    return specs | {f"draft.{i}": draft for i in range(num_draft_layers)}


def groups_of(specs: dict, method: str | None = None) -> list:
    """Returns vLLM's cache groups, with a speculative method or without."""
    layout = SimpleNamespace(is_block_outermost=True)
    drafts = SimpleNamespace(
        method=method, use_eagle=lambda: True, use_eagle_block_drop=lambda: True
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=method and drafts,
    )
    return kv_cache_groups(config, specs)


@pytest.mark.parametrize(
    ("num_layers", "num_draft_layers", "draft", "block_size", "is_padded"),
    [
        (3, 3, compressed(), 32, False),
        (3, 1, compressed(), 64, False),
        (30, 4, compressed(), 128, False),
        (30, 1, compressed(), 256, False),
        (30, 20, compressed(), 32, True),
        (4, 3, compressed(1), 64, True),
        (4, 1, compressed(1), 256, False),
        (8, 1, compressed(2, 128), 256, False),
    ],
)
def test_draft_layers_are_the_first_of_two_groups(
    num_layers: int,
    num_draft_layers: int,
    draft: CompressedAttentionSpec,
    block_size: int,
    is_padded: bool,
) -> None:
    specs = layers(num_layers, num_draft_layers, draft)
    names = [name for name in specs if name.startswith("draft")]
    if draft.block_size != 32:
        specs |= {f"model.{i}": compressed(2, draft.block_size) for i in range(num_layers)}
    ordered = with_draft_layers(specs, names)
    assert set(ordered) == set(specs)
    assert all(ordered[name] == specs[name] for name in specs if name not in names)
    first, second = groups_of(ordered)
    assert set(first.layer_names) == set(names)
    sizes = []
    for group in (first, second):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            assert len(set(map(id, spec.kv_cache_specs.values()))) <= len(group.layer_names)
            spec = next(iter(spec.kv_cache_specs.values()))
        sizes.append(spec.page_size_bytes * len(group.layer_names))
        if group is first:
            assert isinstance(spec, DraftAttentionSpec)
            assert spec.block_size == block_size
            assert (spec.page_size_padded is not None) == is_padded
        else:
            assert spec == compressed(2, draft.block_size)
    assert sizes[0] <= sizes[1]  # blocks are as large as without a draft model


@pytest.mark.parametrize("num_layers", [3, 30])
def test_the_group_of_mtp_layers_is_the_one_whose_last_block_vllm_leaves_out_of_hits(
    num_layers: int,
) -> None:
    ordered = with_draft_layers(layers(num_layers, 1, compressed()), ["draft.0"], drafts_last=True)
    (found,) = (group for group in groups_of(ordered, "mtp") if group.is_eagle_group)
    assert found.layer_names == ["draft.0"]


def test_nothing_changes_without_draft_layers() -> None:
    specs = layers(3, 0, compressed())
    assert with_draft_layers(specs, set()) == specs


def test_models_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"takes 49152 bytes.*at most the 32768"):
        with_draft_layers(layers(2, 3, compressed()), {"draft.0", "draft.1", "draft.2"})
    mixed = layers(2, 2, compressed()) | {"draft.1": compressed(1)}
    with pytest.raises(UnsupportedError, match="one size of cache in the draft model"):
        with_draft_layers(mixed, {"draft.0", "draft.1"})
    chunked = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
    with pytest.raises(UnsupportedError, match=r"found Chunked.*, Compressed.*; use ngram"):
        with_draft_layers({**layers(2, 1, compressed()), "model.1": chunked}, {"draft.0"})
    with pytest.raises(UnsupportedError, match=r"in the draft model.*found Sliding"):
        with_draft_layers({**layers(2, 1, compressed()), "draft.0": WINDOW}, {"draft.0"})


@pytest.mark.parametrize(
    ("num_full", "num_windows", "head_size", "num_draft_layers", "sizes"),
    [
        (12, 12, 32, 1, [1, 12, 12]),
        (4, 20, 32, 1, [1, 4, *[4] * 5]),
        (3, 3, 32, 3, [3, 3, 3]),
        (3, 12, 16, 1, [1, 3, 6, 6]),
        (4, 8, 64, 4, [4, 4, *[2] * 4]),
    ],
)
def test_sliding_windows_have_the_groups_that_they_have_without_drafts(
    num_full: int, num_windows: int, head_size: int, num_draft_layers: int, sizes: list[int]
) -> None:
    """The compressed layers stay in one group, whose blocks are as large as before."""
    specs = layers(num_full, num_draft_layers, compressed())
    window = SlidingWindowSpec(**SHAPE | {"head_size": head_size}, sliding_window=64)
    specs |= {f"window.{i}": window for i in range(num_windows)}
    groups = groups_of(with_draft_layers(specs, [name for name in specs if "draft" in name]))
    assert [len(group.layer_names) for group in groups] == sizes
    bytes_of = [
        sum(specs[name].page_size_bytes for name in group.layer_names) for group in groups[1:]
    ]
    assert set(bytes_of) == {num_full * compressed().page_size_bytes}
