"""Pages that decode steps would read of a complete text, against plain loops."""

from __future__ import annotations

import pytest
import torch

from offline.read_pages import read_mask, recall
from vllm_kvcompress.scheduling.read_rule import ReadRule

SIZE, HEADS, GROUP, TOKENS, COUNT, BLOCK = 4, 2, 3, 210, 40, 32


def scores(query: list[list[float]], keys: list[list[float]], score: str) -> float:
    """Returns the highest of the query heads' bounds on a page, or means of their products with its
    keys over a half of it."""
    values = []
    for one in query:
        products = [sum(q * k for q, k in zip(one, key, strict=True)) for key in keys]
        if score == "mean":
            values += [sum(products[at : at + 16]) / 16 for at in (0, 16)]
        else:
            values.append(sum(max(q * key[at] for key in keys) for at, q in enumerate(one)))
    return max(values)


@pytest.mark.parametrize("score", ["bounds", "mean"])
@pytest.mark.parametrize("kept", [(TOKENS, TOKENS), (170, 160)])
def test_every_token_reads_the_pages_that_decoding_would(score: str, kept: tuple[int, int]) -> None:
    """With all tokens, and with different numbers of kept tokens in two heads."""
    torch.manual_seed(0)
    queries, keys = torch.randn(HEADS * GROUP, COUNT, SIZE), torch.randn(HEADS, TOKENS, SIZE)
    rule = ReadRule.parse(f"longcache:global=32,local=32,span=32,top=1,score={score}", 0)
    held = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
    for head, number in enumerate(kept):
        held[head, torch.randperm(TOKENS - COUNT)[: number - COUNT]] = True
    held[:, -COUNT:] = True
    mask = read_mask(queries, keys, rule, held)
    for head in range(HEADS):
        for query_index in range(COUNT):
            last = TOKENS - COUNT + query_index
            held_tokens = [token for token in range(last + 1) if held[head, token]]
            pages = [held_tokens[at : at + BLOCK] for at in range(0, len(held_tokens), BLOCK)]
            query = queries[head * GROUP : (head + 1) * GROUP, query_index].tolist()
            by_page = {
                page: scores(query, [keys[head, token].tolist() for token in pages[page]], score)
                for page in range(1, len(pages) - 1)
            }
            best = max(by_page, key=lambda page: by_page[page])
            wanted = [token for page in (0, best, len(pages) - 1) for token in pages[page]]
            assert mask[head, query_index].nonzero()[:, 0].tolist() == wanted


def test_recall_counts_the_highest_products() -> None:
    """The first and the last of four tokens with keys 0 to 3 are read."""
    keys, queries = torch.arange(4.0)[None, :, None], torch.ones(1, 1, 1)
    mask = torch.tensor([[[True, False, False, True]]])
    share, weights = recall(queries, keys, mask, 2, 1.0)
    assert share.item() == 0.5
    expected = (1 + torch.e**3) / sum(torch.e**n for n in range(4))
    assert weights.item() == pytest.approx(float(expected))
