"""Policies never wait for a device: they run where values cannot be read."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from offline.gathered_kv import GatheredKV
from tests.policies.cases import POLICIES, Shape, make_pipeline, make_view, with_state
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.policies.base import LayerView

SHAPE = Shape(pages=(9, 6), tail=3)


def on(device: str, view: LayerView) -> LayerView:
    moved, entries = (
        {
            field.name: value.to(device)
            for field in fields(carrier)
            if isinstance(value := getattr(carrier, field.name), torch.Tensor)
        }
        for carrier in (view, view.entries)
    )
    assert view.rotary is not None
    rotary = replace(view.rotary, frequencies=view.rotary.frequencies.to(device))
    kv = view.kv
    assert isinstance(kv, GatheredKV)
    rows, tail = ((keys.to(device), values.to(device)) for keys, values in (kv.rows, kv.tail))
    kv = GatheredKV(kv.lengths.to(device), rows, tail)
    return replace(with_state(view, **entries), **moved, kv=kv, rotary=rotary)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_value_is_read_on_the_host(policy: str, tmp_path: Path) -> None:
    """The meta device has shapes and no values, so reading one, or a size from one, raises."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    view = on("meta", make_view(SHAPE, pipeline.needs.window_size))
    selection = compress_layer(pipeline, view, 7)
    assert selection.page_counts.shape == (2,)
    assert selection.kept_indices.shape == (28,)
    assert selection.page_counts.device.type == selection.kept_indices.device.type == "meta"


def test_the_meta_device_raises_when_a_value_is_read() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        on("meta", make_view(SHAPE, 1)).lengths.sum().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES)
def test_gpus_keep_what_cpus_keep(policy: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    view = make_view(SHAPE, pipeline.needs.window_size)
    expected = compress_layer(pipeline, view, 7)
    moved = on("cuda", view)
    compress_layer(pipeline, moved, 7)  # the first call of a kernel may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        selection = compress_layer(pipeline, moved, 7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(selection.page_counts.cpu(), expected.page_counts)
    assert torch.equal(selection.kept_indices.cpu(), expected.kept_indices)
