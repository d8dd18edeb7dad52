"""AsymKV's and KVSlimmer's weights, against autograd's derivatives of attention."""

from __future__ import annotations

import pytest
import torch

from tests.policies.cases import HEAD_SIZE, Shape, make_view
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.merging.asymkv import AsymKV
from vllm_kvcompress.policies.merging.groups import Groups, tokens_of
from vllm_kvcompress.policies.merging.kvslimmer import KVSlimmer
from vllm_kvcompress.policies.parts.mass import observed_mass

NUM_TOKENS, PAIRS = 12, [(1, 2), (4, 5), (8, 9)]


def output(view: LayerView, keys: torch.Tensor) -> torch.Tensor:
    """[D] attention output of the only query, in fp64."""
    query, values = view.queries[0, 0].double(), view.kv.values()[0].double()
    return torch.softmax(view.scale * keys @ query, dim=0) @ values


def one_query(seed: int) -> tuple[LayerView, torch.Tensor, Groups]:
    """A head that one query attends to, its mass, and pairs of linked tokens."""
    view = make_view(Shape((3,), group=1, seed=seed), 1)
    link = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    link[0, [second for _, second in PAIRS]] = 1
    return view, observed_mass(view), Groups.of(view, link)


@pytest.mark.parametrize("seed", range(3))
def test_asymkv_s_proxy_is_the_squared_gradient_of_an_isotropic_loss(seed: int) -> None:
    """Summed over losses that are each one coordinate of the output; in every dimension of keys."""
    view, mass, groups = one_query(seed)
    keys = view.kv.keys()[0].double()
    jacobian = torch.autograd.functional.jacobian(lambda k: output(view, k), keys)
    squares = (jacobian**2).sum(dim=0)
    actual = AsymKV().weigh(view, mass, groups, tokens_of(view))[0][0].double()
    for pair in map(list, PAIRS):
        expected = squares[pair] / squares[pair].sum(dim=0)
        weights = actual[pair] / actual[pair].sum()
        assert torch.allclose(expected, weights[:, None].expand(-1, HEAD_SIZE), atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_kvslimmer_s_terms_are_those_of_the_hessian(seed: int) -> None:
    """Norms over the output's coordinates of its second derivatives by two keys (Eq. 33)."""
    view, mass, groups = one_query(seed)
    keys, query = view.kv.keys()[0].double(), view.queries[0, 0].double()
    at = int(query.abs().argmax())  # every block is a multiple of q q^T
    blocks = torch.stack(
        [
            torch.autograd.functional.hessian(lambda k, d=d: output(view, k)[d], keys)
            for d in range(HEAD_SIZE)
        ]
    )[:, :, at, :, at]
    size = blocks.norm(dim=0)
    actual = KVSlimmer().weigh(view, mass, groups, tokens_of(view))[0][0].double()
    for i, j in PAIRS:
        own = size[i, i] - size[i, j], size[j, j] - size[i, j]
        if min(own) <= 0 or float(mass[0, i] + mass[0, j]) >= 0.5:
            continue  # clipped, or not safe: the ladder's
        assert float(actual[i] / (actual[i] + actual[j])) == pytest.approx(
            float(own[0] / sum(own)), abs=1e-4
        )
        break
    else:
        pytest.fail("no pair has weights between 0 and 1")
