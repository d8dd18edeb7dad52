"""Choice of pages on CPUs, compiled by numba, which vLLM depends on.

In torch, gathering, multiplying and ranking summaries are operators that each wait for memory: rows
of a few hundred bytes lie apart, and a CPU does not guess the next one. Here a row is read once, in
place, and prefetched some rows ahead.

A single thread does it all: numba's threads are not torch's, and each would spin on a core that one
of the others needs. On two cores that doubled the time of attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array
from torch import Tensor

from vllm_kvcompress.kernels import page_choice
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.page_choice import Choice, PageLists

PREFETCHED_ROWS = 8
CACHE_LINE = 64  # bytes
MAX_THREADS = 4  # of torch; with more threads, torch is faster
MAX_QUERIES = 16  # of a sequence; a chunk has more, for which a matrix product is faster
VIEWS = {torch.bfloat16: torch.uint16, torch.float32: torch.float32, torch.int8: torch.int8}
NO_SCALES = torch.empty(0)
# Sums in any order; infinite and undefined numbers stay what they are.
SUMS = {"reassoc", "contract", "nsz"}


def compiled(**options: Any) -> Any:
    """`numba.njit` with an on-disk cache, where there is a place to write it."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(function, cache=True, nogil=True, **options)
        except RuntimeError:  # nowhere to write
            return numba.njit(function, nogil=True, **options)

    return decorate


@intrinsic
def _prefetch(context, array, place):
    """Prefetches an element of a contiguous array."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        flag = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        builder.call(prefetch, [address, flag(0), flag(3), flag(1)])  # to read data, to all caches
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _number(value):
    """Converts an element of summaries or queries to fp32."""
    raise NumbaError("only where it is compiled")


@overload(_number)
def _number_of_type(value):
    if value == types.uint16:  # the bits of a bfloat16 number
        return lambda value: np.uint32(np.uint32(value) << 16).view(np.float32)
    return lambda value: np.float32(value)


@compiled(fastmath=SUMS)
def _product(numbers, factors):
    """Dot product of two vectors."""
    product = np.float32(0)
    for element in range(len(factors)):
        product += _number(numbers[element]) * factors[element]
    return product


@compiled()
def _summary_factors(queries, bounds):
    """Twin of `summary_factors` in fp32; `bounds` is whether summaries are bounds."""
    num_sequences, group, head_size = queries.shape
    factors = np.empty((num_sequences, group, head_size * (2 if bounds else 1)), np.float32)
    for sequence in range(num_sequences):
        for member in range(group):
            for element in range(head_size):
                number = _number(queries[sequence, member, element])
                if bounds:
                    factors[sequence, member, element] = min(number, np.float32(0))
                    factors[sequence, member, head_size + element] = max(number, np.float32(0))
                else:
                    factors[sequence, member, element] = number
    return factors


@compiled()
def _fill_scores(factors, summaries, scales, page_table, num_pages, scores):
    """Fills [S, W] scores of the existing pages.

    factors: [S, G, length] fp32 factors of each part of a page's summary; summaries: [any,
    parts * length]; scales: [any] or [0].
    """
    num_sequences, width = page_table.shape
    _, group, length = factors.shape
    step = CACHE_LINE // summaries.itemsize
    for place in range(num_sequences * width):
        sequence, column = place // width, place % width
        later, later_column = (place + PREFETCHED_ROWS) // width, (place + PREFETCHED_ROWS) % width
        if later < num_sequences and later_column < num_pages[later]:
            summary = summaries[page_table[later, later_column]]
            for element in range(0, len(summary), step):
                _prefetch(summary, element)
        if column >= num_pages[sequence]:
            continue
        page = page_table[sequence, column]
        best = np.float32(-np.inf)
        for member in range(group):
            for start in range(0, summaries.shape[1], length):
                part = summaries[page, start : start + length]
                best = max(best, _product(part, factors[sequence, member]))
        if len(scales):
            best *= scales[page]
        scores[sequence, column] = best + np.float32(0)  # no -0.0, which would be below 0.0


@compiled()
def _lowest_of(numbers, wanted):
    """The lowest of the `wanted` highest numbers, found bit by bit by counting."""
    lowest = np.int64(-(1 << 31))
    for bit in range(31, -1, -1):
        higher = np.int32(lowest + (1 << bit))
        count = np.int32(0)
        for number in numbers:
            count += np.int32(number >= higher)
        if count >= wanted:
            lowest = np.int64(higher)
    return np.int32(lowest)


@compiled()
def _take_highest(scores, page_table, num_pages, num_read, num_first, num_last, chosen):
    """Fills [S, most] pages of the highest scores, in their order; of equals the later ones."""
    for sequence in range(len(page_table)):
        count, read = num_pages[sequence], num_read[sequence]
        row = scores[sequence, :count]
        row[:num_first] = np.inf
        row[max(0, count - num_last) :] = np.inf
        ranked = row.view(np.int32)  # the scores' order, once the bits of negative ones are flipped
        for column in range(count):
            ranked[column] ^= (ranked[column] >> 31) & 0x7FFFFFFF
        lowest = _lowest_of(ranked, read)
        too_many = np.sum(ranked >= lowest) - read
        place = 0
        for column in range(count):
            if ranked[column] == lowest and too_many > 0:
                too_many -= 1
            elif ranked[column] >= lowest:
                chosen[sequence, place] = page_table[sequence, column]
                place += 1


@compiled()
def _choose(
    queries, summaries, page_table, num_pages, num_read, scales, means, first, last, chosen
):
    """Chooses pages in one call; a call of a compiled function costs some hundred pages."""
    factors = _summary_factors(queries, not means)
    scores = np.empty(page_table.shape, np.float32)
    _fill_scores(factors, summaries, scales, page_table, num_pages, scores)
    _take_highest(scores, page_table, num_pages, num_read, first, last, chosen)


def choose_pages(
    queries: Tensor,
    summaries: Tensor,
    pages: PageLists,
    choice: Choice,
    scales: Tensor | None = None,
) -> Tensor:
    """Numba launcher of `choose_pages`; the twin serves chunks, fp16 and many threads."""
    by_twin = queries.shape[1] > MAX_QUERIES or torch.get_num_threads() > MAX_THREADS
    if by_twin or summaries.dtype not in VIEWS or queries.dtype not in VIEWS:
        return twin(page_choice.choose_pages)(queries, summaries, pages, choice, scales)
    chosen = torch.zeros((len(queries), choice.most), dtype=torch.int32)
    scales = NO_SCALES if scales is None else scales
    tensors = (queries, summaries, *pages, scales)
    rules = (bool(choice.num_means), choice.num_first, choice.num_last)
    _choose(*map(_numbers, tensors), *rules, chosen.numpy())
    return chosen


def _numbers(tensor: Tensor) -> Any:
    """Views the elements as a contiguous numpy array."""
    return tensor.view(VIEWS.get(tensor.dtype, tensor.dtype)).contiguous().numpy()
