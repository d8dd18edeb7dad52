"""Links that share no entry, against a greedy loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.kernels.merging.pairs import disjoint_links, max_rounds
from vllm_kvcompress.rounding import ceil_div

WEIGHTS = st.sampled_from([float("-inf"), -1.0, 0.0, 0.5, 2.0, 3e38, float("inf")])
LINKS = st.lists(st.tuples(WEIGHTS, st.booleans()), min_size=1, max_size=20)


def greedy(weights: list[float], able: list[bool]) -> list[int]:
    """Links in the order in which they are taken."""
    taken: list[int] = []
    for j in sorted(range(len(weights)), key=lambda j: (weights[j], -j)):
        if able[j] and not {j - 1, j + 1} & set(taken):
            taken.append(j)
    return taken


@given(heads=st.lists(LINKS, min_size=1, max_size=3), data=st.data())
def test_links_are_taken_from_the_lightest_on(
    heads: list[list[tuple[float, bool]]], data: st.DataObject
) -> None:
    """For every number of links that can be had, in every head by itself."""
    width = max(map(len, heads))
    weights, able = torch.zeros(len(heads), width), torch.zeros(len(heads), width, dtype=torch.bool)
    expected, numbers = [], []
    for row, links in enumerate(heads):
        each = [weight for weight, _ in links], [here for _, here in links]
        weights[row, : len(links)], able[row, : len(links)] = map(torch.tensor, each)
        taken = greedy(*each)
        numbers.append(data.draw(st.integers(0, len(taken))))
        expected.append(sorted(taken[: numbers[-1]]))
    results = disjoint_links(weights, able, torch.tensor(numbers))
    assert [row.nonzero()[:, 0].tolist() for row in results] == expected


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=20))
def test_a_third_of_the_links_in_a_row_can_always_be_had(weights: list[float]) -> None:
    number = ceil_div(len(weights), 3)
    able = torch.ones(1, len(weights), dtype=torch.bool)
    taken = disjoint_links(torch.tensor([weights]), able, torch.tensor([number]))
    assert int(taken.sum()) == number


def test_rounds_are_enough_to_leave_one_entry() -> None:
    for size in range(1, 3000):
        links, rounds = size - 1, 0
        while links:
            links -= ceil_div(links, 3)
            rounds += 1
        assert rounds <= max_rounds(size)
