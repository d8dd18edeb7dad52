"""What decode steps would read of a text that is at hand as a whole, against loops."""

from __future__ import annotations

import pytest
import torch

from offline.read_pages import read_mask, recall
from vllm_kvcompress.scheduling.read_rule import ReadRule

SIZE, HEADS, GROUP, TOKENS, COUNT, BLOCK = 4, 2, 3, 210, 40, 32


def scores(query: list[list[float]], keys: list[list[float]], score: str) -> float:
    """The highest of the query heads' bounds on a page, of their products with its keys, or of the
    means of these over a half of it."""
    found = []
    for one in query:
        products = [sum(q * k for q, k in zip(one, key, strict=True)) for key in keys]
        if score == "keys":
            found += products
        elif score == "mean":
            found += [sum(products[at : at + 16]) / 16 for at in (0, 16)]
        else:
            found.append(sum(max(q * key[at] for key in keys) for at, q in enumerate(one)))
    return max(found)


@pytest.mark.parametrize("score", ["bounds", "keys", "mean"])
@pytest.mark.parametrize("kept", [(TOKENS, TOKENS), (170, 160)])
def test_every_token_reads_as_if_it_were_decoded(score: str, kept: tuple[int, int]) -> None:
    """Of everything, and of what two heads have kept, the last tokens among it."""
    torch.manual_seed(0)
    queries, keys = torch.randn(HEADS * GROUP, COUNT, SIZE), torch.randn(HEADS, TOKENS, SIZE)
    rule = ReadRule.parse(f"longcache:global=32,local=32,span=32,top=1,score={score}", 0)
    held = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
    for head, number in enumerate(kept):
        held[head, torch.randperm(TOKENS - COUNT)[: number - COUNT]] = True
    held[:, -COUNT:] = True
    mask = read_mask(queries, keys, rule, held)
    for head in range(HEADS):
        for nth in range(COUNT):
            last = TOKENS - COUNT + nth
            mine = [token for token in range(last + 1) if held[head, token]]
            pages = [mine[at : at + BLOCK] for at in range(0, len(mine), BLOCK)]
            query = queries[head * GROUP : (head + 1) * GROUP, nth].tolist()
            found = {
                page: scores(query, [keys[head, token].tolist() for token in pages[page]], score)
                for page in range(1, len(pages) - 1)
            }
            best = max(found, key=lambda page: found[page])
            wanted = [token for page in (0, best, len(pages) - 1) for token in pages[page]]
            assert mask[head, nth].nonzero()[:, 0].tolist() == wanted


def test_recall_is_of_the_highest_products() -> None:
    """Of four tokens with keys 0 to 3 two are read: the first and the last."""
    keys, queries = torch.arange(4.0)[None, :, None], torch.ones(1, 1, 1)
    mask = torch.tensor([[[True, False, False, True]]])
    found, weights = recall(queries, keys, mask, 2, 1.0)
    assert found.item() == 0.5
    expected = (1 + torch.e**3) / sum(torch.e**n for n in range(4))
    assert weights.item() == pytest.approx(float(expected))
