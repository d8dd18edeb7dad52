"""Whole pages: exact totals within bounds, as close to the shares as whole numbers can be."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.policies import oracles
from vllm_kvcompress.kernels.apportion import apportion
from vllm_kvcompress.policies.parts.allocation import spread


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[float], int, list[int], list[int]]:
    """Shares, a total, floors and capacities that fit."""
    capacity = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    floor = [draw(st.integers(0, most)) for most in capacity]
    total = draw(st.integers(sum(floor), sum(capacity)))
    share = st.one_of(st.integers(0, 50).map(float), st.floats(0, 1e6))
    shares = [draw(share) for _ in capacity]
    return shares, total, floor, capacity


def on_device(shares: list[float], total: int, floor: list[int], capacity: list[int]) -> list[int]:
    pages = apportion(
        torch.tensor([shares], dtype=torch.float64),
        torch.tensor([total]),
        torch.tensor([floor]),
        torch.tensor([capacity]),
    )
    return [int(count) for count in pages[0]]


@given(divisions())
def test_totals_are_exact_and_bounds_hold(
    division: tuple[list[float], int, list[int], list[int]],
) -> None:
    shares, total, floor, capacity = division
    pages = on_device(shares, total, floor, capacity)
    assert sum(pages) == total
    assert all(lo <= p <= hi for lo, p, hi in zip(floor, pages, capacity, strict=True))


def test_layers_get_their_least_where_all_of_it_fits() -> None:
    assert spread([3.0, 1.0], 6, [9, 9], [0, 3]) == [3, 3]
    assert spread([3.0, 1.0], 6, [9, 1], [0, 3]) == [5, 1]
    assert spread([2.0, 1.0], 6, [9, 9], [4, 3]) == [4, 2]


@given(
    shares=st.lists(st.integers(0, 30), min_size=1, max_size=9),
    total=st.integers(0, 60),
    capacity=st.integers(7, 40),
)
def test_rounding_is_that_of_the_loop(shares: list[int], total: int, capacity: int) -> None:
    caps, floors = [capacity] * len(shares), [0] * len(shares)
    total = min(total, sum(caps))
    weights = [float(share) for share in shares]
    assert on_device(weights, total, floors, caps) == oracles.divide(weights, total, floors, caps)


@pytest.mark.parametrize("num_heads", [20, 150, 640])
def test_many_heads_are_divided_as_by_the_loop(num_heads: int) -> None:
    """All heads of a model at once, of which some have all and some the least."""
    random = Random(num_heads)
    for _ in range(5):
        shares = [random.random() ** 8 for _ in range(num_heads)]
        caps = [random.randint(1, 40) for _ in shares]
        floors = [random.randint(0, 1) for _ in shares]
        total = random.randint(sum(floors), sum(caps))
        assert on_device(shares, total, floors, caps) == oracles.divide(shares, total, floors, caps)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_whole_shares_are_left_alone(shares: list[int]) -> None:
    pages = on_device(
        [float(s) for s in shares], sum(shares), [0] * len(shares), [30] * len(shares)
    )
    assert pages == shares


def test_a_full_head_hands_its_surplus_to_the_others_in_proportion() -> None:
    # 24 pages by 8:2:1:1 would be 16, 4, 2, 2; the first holds only 4.
    assert on_device([8, 2, 1, 1], 24, [0] * 4, [4, 40, 40, 40]) == [4, 10, 5, 5]


def test_remainders_go_to_the_largest_then_to_the_earlier() -> None:
    assert on_device([1, 1, 1], 5, [0] * 3, [9] * 3) == [2, 2, 1]
    assert on_device([1.0, 1.5, 1.5], 5, [0] * 3, [9] * 3) == [1, 2, 2]


def test_heads_without_a_share_take_what_others_cannot_hold() -> None:
    assert on_device([0, 1], 7, [0, 0], [5, 4]) == [3, 4]
    assert spread([0.0, 1.0], 7, [5, 4]) == [3, 4]
