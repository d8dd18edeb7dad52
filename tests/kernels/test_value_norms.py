"""Norms of projected values over pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.value_norms import output_roots, value_norms_l1, value_norms_l2

L1 = "vllm_kvcompress.kernels.value_norms_triton.value_norms_l1"


def o_proj(num_heads: int, head_size: int, group: int, width: int, dtype: torch.dtype) -> Tensor:
    """[H, D, G, M] view of a weight that lies in memory as models store it, [M, H * G * D]."""
    weight = random(width, num_heads * group * head_size, dtype=dtype) / width**0.5
    return weight.view(width, num_heads, group, head_size).permute(1, 3, 2, 0)


def roots_of(weight: Tensor) -> Tensor:
    """[H, G, D, D] L with L L^T = W W^T."""
    return output_roots(weight.permute(0, 2, 1, 3))


def test_twins_are_the_oracle() -> None:
    entries = make_entries([3, 0, 8], block_size=4, head_size=8)
    weight = o_proj(3, 8, 2, 24, torch.float32)
    wanted = random(3, entries.capacity) > 0
    expected = torch.tensor(oracles.value_norms(entries, weight, 1))
    norms = value_norms_l1(PagedKV.of(entries), weight, wanted)
    assert_close(norms, expected.masked_fill(~wanted, 0), torch.float32)
    expected = torch.tensor(oracles.value_norms(entries, weight, 2))
    norms = value_norms_l2(PagedKV.of(entries), roots_of(weight))
    assert_close(norms, expected, torch.float32)


L2 = "vllm_kvcompress.kernels.value_norms_triton.value_norms_l2"
SHAPES = [(64, 16, 1), (80, 32, 4), (128, 128, 4), (256, 64, 8)]


@pytest.mark.parametrize(("head_size", "block_size", "group"), SHAPES)
def test_l1_is_the_twin(backend: Backend, head_size: int, block_size: int, group: int) -> None:
    """Three tiles of columns, the last one partial; some tiles without a wanted entry."""
    entries = make_entries([300, 0, 1], block_size, head_size, backend.dtype)
    weight = o_proj(3, head_size, group, 280, backend.dtype)
    wanted = random(3, entries.capacity) > 0
    wanted[0, :150] = False
    expected = backend.twin(twin(value_norms_l1), PagedKV.of(entries), weight, wanted)
    norms = backend.call(L1, PagedKV.of(entries), weight, wanted)
    assert_close(norms, expected, backend.dtype)
    assert norms[0].any()


@pytest.mark.parametrize(("head_size", "block_size", "group"), SHAPES)
def test_l2_is_the_twin(backend: Backend, head_size: int, block_size: int, group: int) -> None:
    view = PagedKV.of(make_entries([100, 0, 1], block_size, head_size, backend.dtype))
    root = roots_of(o_proj(3, head_size, group, 280, backend.dtype))
    expected = backend.twin(twin(value_norms_l2), view, root)
    assert_close(backend.call(L2, view, root), expected, backend.dtype)


def test_heads_of_several_requests_share_weights(backend: Backend) -> None:
    lengths = [30, 0, 5, 17, 40, 2]
    entries, weight = (
        make_entries(lengths, 16, 64, backend.dtype),
        o_proj(3, 64, 2, 48, backend.dtype),
    )
    view, again = PagedKV.of(entries), torch.cat([weight, weight])
    root, wanted = roots_of(weight), entries.valid()
    for name, operator, given, alone in (
        (L1, twin(value_norms_l1), (weight, wanted), (again, wanted)),
        (L2, twin(value_norms_l2), (root,), (root.repeat(2, 1, 1, 1),)),
    ):
        expected = backend.twin(operator, view, *alone)
        assert_close(backend.twin(operator, view, *given), expected, backend.dtype)
        assert_close(backend.call(name, view, *given), expected, backend.dtype)


def test_requests_of_several_layers_share_each_layer_s_matrices(backend: Backend) -> None:
    """Two layers of three requests with two heads: layer by layer, there request by request."""
    lengths = [30, 0, 5, 17, 40, 2, 21, 16, 3, 9, 0, 33]
    view = PagedKV.of(make_entries(lengths, 16, 64, backend.dtype))
    root = roots_of(o_proj(4, 64, 2, 48, backend.dtype))
    by_head = torch.stack(
        [root[2 * layer + head] for layer in (0, 1) for _ in range(3) for head in (0, 1)]
    )
    expected = backend.twin(twin(value_norms_l2), view, by_head)
    assert_close(backend.twin(twin(value_norms_l2), view, root, 2), expected, backend.dtype)
    assert_close(backend.call(L2, view, root, 2), expected, backend.dtype)


def test_launchers_refuse_wrong_shapes(interpreter: Child) -> None:
    view = PagedKV.of(make_entries([5, 3]))
    weight = o_proj(2, 64, 4, 96, torch.float32)
    wanted = torch.ones(2, view.capacity, dtype=torch.bool)
    with pytest.raises(InvariantError, match=r"expected o_proj \[2, 64, group, width\]"):
        interpreter.call(L1, view, weight.transpose(0, 1), wanted)
    with pytest.raises(InvariantError, match=r"expected wanted \[2, 32\]"):
        interpreter.call(L1, view, weight, wanted[:, 1:])
    with pytest.raises(InvariantError, match="contiguous roots"):
        interpreter.call(L2, view, roots_of(weight).half())
