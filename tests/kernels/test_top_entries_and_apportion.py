"""The best entries of heads, and pages divided among heads, as a GPU finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.backends import Backend
from tests.kernels.child import Child
from tests.policies import oracles
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.apportion import apportion
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.top_entries import top_entries

TOP_ENTRIES = "vllm_kvcompress.kernels.top_entries_triton.top_entries"
IN_SMALL_TILES = "tests.kernels.launches.top_entries_in_small_tiles"
APPORTION = "vllm_kvcompress.kernels.apportion_triton.apportion"
NAN, INF = float("nan"), float("inf")
# Zeros of both signs, the smallest numbers that differ, and what is kept whatever comes.
NEIGHBOURS = [1.0, 1.0000001, -1.0, -1.0000001, 1e-45, -1e-45]
SPECIAL = [0.0, -0.0, NAN, INF, -INF, 3e38, -3e38, *NEIGHBOURS]


def expected_entries(scores: Tensor, valid: Tensor, num_kept: list[int]) -> list[list[int]]:
    """By head, in order, from loops."""
    results = []
    for row, able, count in zip(scores.tolist(), valid.tolist(), num_kept, strict=True):
        numbers = [-INF if number != number else number for number in row]
        places = [place for place, here in enumerate(able) if here]
        results.append(sorted(oracles.best(places, numbers, count)))
    return results


def places_of(kept: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in kept]


def drawn(kind: str, num_heads: int, num_entries: int) -> Tensor:
    """Scores that are all different, mostly equal, or special."""
    generator = torch.Generator().manual_seed(num_entries)
    shape = (num_heads, num_entries)
    if kind == "different":
        return torch.randn(shape, generator=generator)
    if kind == "equal":
        return torch.randint(-1, 2, shape, generator=generator).float()
    return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]


@pytest.mark.parametrize("kind", ["different", "equal", "special"])
# Within a tile of 2,048 entries, at its end, and over several.
@pytest.mark.parametrize("num_entries", [1, 37, 2048, 2049, 5001])
def test_top_entries_are_those_of_a_sort(backend: Backend, kind: str, num_entries: int) -> None:
    scores = drawn(kind, 5, num_entries).to(backend.dtype)
    chance = torch.tensor([1.0, 0.7, 0.0, 0.3, 1.0])[:, None]
    valid = torch.rand(5, num_entries, generator=torch.Generator().manual_seed(2)) < chance
    able = valid.sum(dim=1)
    num_kept = torch.stack((able[0], able[1] // 2, able[2], (able[3] + 1) // 2, able[4] * 0))
    expected = expected_entries(scores.float(), valid, num_kept.tolist())
    assert places_of(backend.call(TOP_ENTRIES, scores, valid, num_kept)) == expected
    assert places_of(top_entries(scores, valid, num_kept)) == expected


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_scores(interpreter_calls: Callable[..., Any], data: st.DataObject) -> None:
    numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    row = data.draw(st.lists(numbers, min_size=1, max_size=30))
    num_kept = data.draw(st.integers(0, len(row)))
    scores = torch.tensor([row])
    valid = torch.ones_like(scores, dtype=torch.bool)
    expected = expected_entries(scores, valid, [num_kept])
    for kept in (
        interpreter_calls(TOP_ENTRIES, scores, valid, torch.tensor([num_kept])),
        top_entries(scores, valid, torch.tensor([num_kept])),
    ):
        assert places_of(kept) == expected


def test_ties_over_many_tiles(interpreter: Child) -> None:
    """A program looks at the tiles behind its own a few at once."""
    num_entries, tile = 7 * 64 - 3, 64
    valid = torch.zeros(1, num_entries, dtype=torch.bool)
    places = torch.tensor([5, 63, 64, 3 * 64 + 1, 5 * 64, num_entries - 1])
    valid[0, places] = True
    scores = torch.zeros(1, num_entries)
    for count in range(7):
        kept = interpreter.call(IN_SMALL_TILES, scores, valid, torch.tensor([count]), tile, 2)
        assert kept[0].nonzero()[:, 0].tolist() == places[6 - count :].tolist()


def test_rows_that_are_parts_of_longer_ones(backend: Backend) -> None:
    scores = torch.arange(60.0).view(3, 20)
    valid = scores % 4 != 0
    kept = backend.call(TOP_ENTRIES, scores[:, 2:9], valid[:, 2:9], torch.tensor([1, 2, 5]))
    assert places_of(kept) == [[5], [4, 5], [0, 1, 3, 4, 5]]


def test_no_entries(backend: Backend) -> None:
    none = torch.zeros(2, 0)
    kept = backend.call(TOP_ENTRIES, none, none.bool(), torch.zeros(2, dtype=torch.int64))
    assert kept.shape == (2, 0)


# --- pages of heads ---------------------------------------------------------------------------

SHARES: list[tuple[list[float], int, list[int], list[int]]] = [
    ([8, 2, 1, 1], 24, [0] * 4, [4, 40, 40, 40]),  # what a full head cannot take
    ([1, 1, 1], 5, [0] * 3, [9] * 3),  # equal remainders
    ([0, 0, 0], 7, [1, 1, 1], [5, 1, 4]),  # nobody has a share
    ([0, 1], 7, [0, 0], [5, 4]),  # no share, but nobody else has room
    ([3, 5], 4, [2, 2], [9, 9]),  # floors alone
    ([3, 5], 18, [2, 2], [9, 9]),  # everything
    ([1e6, 1e-3], 10, [0, 0], [20, 20]),
    ([2.0], 3, [0], [8]),
    ([1, 2], 0, [0, 0], [3, 3]),
    (list(range(17)), 60, [1] * 17, [11] * 17),  # more heads than a power of two
]


@pytest.mark.parametrize(("shares", "total", "floor", "cap"), SHARES)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_pages_are_those_of_the_loop(
    backend: Backend,
    precision: torch.dtype,
    shares: list[float],
    total: int,
    floor: list[int],
    cap: list[int],
) -> None:
    numbers = torch.tensor([shares], dtype=precision)
    bounds = torch.tensor([floor]), torch.tensor([cap])
    pages = backend.call(APPORTION, numbers, torch.tensor([total]), *bounds)
    assert pages.dtype == torch.int64
    assert pages[0].tolist() == oracles.divide(numbers[0].tolist(), total, floor, cap)


def test_requests_have_totals_of_their_own(backend: Backend) -> None:
    fitting = [case for case in SHARES if len(case[0]) == 3]
    columns = [torch.tensor(column) for column in zip(*fitting, strict=True)]
    pages = backend.call(APPORTION, columns[0].double(), *columns[1:])
    assert len(pages) == 2
    assert pages.tolist() == [oracles.divide(*case) for case in fitting]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[float], int, list[int], list[int]]:
    """Shares, a total, floors and capacities that fit."""
    cap = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    floor = [draw(st.integers(0, most)) for most in cap]
    shares = [float(draw(st.integers(0, 50))) for _ in cap]
    return shares, draw(st.integers(sum(floor), sum(cap))), floor, cap


@settings(deadline=None, max_examples=60, derandomize=True)
@given(division=divisions())
def test_any_division_is_the_twins(
    interpreter_calls: Callable[..., Any],
    division: tuple[list[float], int, list[int], list[int]],
) -> None:
    shares, total, floor, cap = division
    given_ = tuple(map(torch.tensor, ([shares], [total], [floor], [cap])))
    pages = interpreter_calls(APPORTION, *given_)
    assert pages.tolist() == twin(apportion)(*given_).tolist()
    assert int(pages.sum()) == total


def test_launchers_refuse_wrong_shapes(interpreter: Child) -> None:
    three, two = torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(
        InvariantError, match=r"a total per request, got \(1, 3\), \(1, 2\), \(1, 2\)"
    ):
        interpreter.call(APPORTION, three, two[:, 0], two, two)
    with pytest.raises(InvariantError, match=r"got \(1, 3\), \(1, 3\) and \(2,\); pass one row"):
        interpreter.call(TOP_ENTRIES, three, three.bool(), two[0])


@pytest.fixture(scope="module")
def interpreter_calls(interpreter: Child) -> Callable[..., Any]:
    """The interpreter, for tests with drawn examples."""
    return interpreter.call
