"""AsymKV's and KVSlimmer's weights, against autograd's derivatives of attention.

And what of these weights goes on from event to event.
"""

from __future__ import annotations

import pytest
import torch

from tests.policies.cases import HEAD_SIZE, Shape, make_view, with_state
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.merging.asymkv import AsymKV
from vllm_kvcompress.policies.merging.groups import GroupSums, tokens_of
from vllm_kvcompress.policies.merging.kvslimmer import KVSlimmer
from vllm_kvcompress.policies.parts.mass import observed_mass

NUM_TOKENS, PAIRS = 12, [(1, 2), (4, 5), (8, 9)]


def output(view: LayerView, keys: torch.Tensor) -> torch.Tensor:
    """[D] attention output of the only query, in fp64."""
    query, values = view.queries[0, 0].double(), view.kv.values()[0].double()
    return torch.softmax(view.scale * keys @ query, dim=0) @ values


def one_query(seed: int) -> tuple[LayerView, torch.Tensor, GroupSums]:
    """A head that one query attends to, its mass, and pairs of linked tokens."""
    view = make_view(Shape((3,), group=1, seed=seed), 1)
    link = torch.zeros(1, NUM_TOKENS, dtype=torch.bool)
    link[0, [second for _, second in PAIRS]] = True
    return view, observed_mass(view), GroupSums.of(view, link)


@pytest.mark.parametrize("seed", range(3))
def test_asymkv_s_proxy_is_the_squared_gradient_of_an_isotropic_loss(seed: int) -> None:
    """Summed over losses that are each one coordinate of the output; in every dimension of keys."""
    view, mass, groups = one_query(seed)
    keys = view.kv.keys()[0].double()
    jacobian = torch.autograd.functional.jacobian(lambda k: output(view, k), keys)
    squares = (jacobian**2).sum(dim=0)
    actual = AsymKV().weigh(view, mass, groups, tokens_of(view))[0].double()
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
    actual = KVSlimmer().weigh(view, mass, groups, tokens_of(view))[0].double()
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


@pytest.mark.parametrize("former", [False, True])
def test_sizes_of_gradients_add_up_and_merged_entries_add_theirs(former: bool) -> None:
    view, mass, groups = one_query(1)
    before = torch.rand(1, NUM_TOKENS) if former else torch.zeros(1, NUM_TOKENS)
    policy, tokens = AsymKV(running="on"), tokens_of(view)
    now = AsymKV().weigh(view, mass, groups, tokens).sqrt()
    if former:
        view = with_state(view, running=before)
    weight = policy.weigh(view, mass, groups, tokens)
    assert torch.allclose(weight, (now + before) ** 2, atol=1e-6)
    actual = policy.add_up(view, mass, groups, weight)
    assert actual is not None
    for i, j in PAIRS:
        expected = (now + before)[0, [i, j]].sum()
        assert float(actual[0, i]) == pytest.approx(float(expected), abs=1e-5)
    assert policy.needs.running
    assert not AsymKV().needs.running


def test_kvslimmer_adds_up_its_own_terms_as_the_authors_code_does() -> None:
    view, mass, groups = one_query(2)
    view = with_state(view, running=torch.rand(1, NUM_TOKENS))
    policy = KVSlimmer(variant="code", running="on")
    weight = policy.weigh(view, mass, groups, tokens_of(view))
    actual = policy.add_up(view, mass, groups, weight)
    assert actual is not None
    values, alpha = view.kv.values()[0].double(), mass[0].double() / float(mass.sum())
    size = (values - alpha @ values).abs().sum(dim=1)
    own = alpha * (1 - 2 * alpha) * size + view.entries.running[0].double()  # type: ignore[index]
    for i, j in PAIRS:
        cross = float(alpha[i] * alpha[j] * (size[i] + size[j]))
        raw = [max(0.0, float(own[k]) - cross) for k in (i, j)]
        if float(alpha[[i, j]].sum()) >= 0.5:
            raw = [float(alpha[k] * size[k] + view.entries.running[0, k]) for k in (i, j)]  # type: ignore[index]
        share = [w / sum(raw) for w in raw]
        assert weight[0, [i, j]].tolist() == pytest.approx(raw, abs=1e-4)
        expected = share[0] ** 2 * float(own[i]) + share[1] ** 2 * float(own[j])
        assert float(actual[0, i]) == pytest.approx(expected, abs=1e-4)
