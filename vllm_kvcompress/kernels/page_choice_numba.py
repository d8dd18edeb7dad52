"""Choosing pages on CPUs, compiled by numba, which vLLM brings along.

In torch all summaries are gathered, multiplied and ranked, by an operator each that waits for
memory: rows of a few hundred bytes lie apart, and a CPU does not guess the next one. Here a row is
read once, where it lies, and asked for some rows before.

One thread does it all: numba's threads are not torch's, and each would wait, spinning, on a core
that one of the others needs. On two cores that doubled what attention takes.
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
from vllm_kvcompress.kernels.page_choice import Choice

AHEAD = 8  # rows
LINE = 64  # bytes that memory gives at once
MOST_THREADS = 4  # of torch; more are faster in torch, by what one of two takes
MOST_QUERIES = 16  # of a sequence; those of a chunk are a product of matrices
VIEWS = {torch.bfloat16: torch.uint16, torch.float32: torch.float32, torch.int8: torch.int8}
NO_SCALES = torch.empty(0)
# Sums in any order; infinite and undefined numbers stay what they are.
SUMS = {"reassoc", "contract", "nsz"}


def compiled(**options: Any) -> Any:
    """`numba.njit`, with what is compiled kept for later processes where it can be."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(function, cache=True, nogil=True, **options)
        except RuntimeError:  # nowhere to write
            return numba.njit(function, nogil=True, **options)

    return decorate


@intrinsic
def _ask_for(context, array, place):
    """Has the element of a contiguous array brought into the CPU's caches."""

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
    """An element of the summaries in fp32."""
    raise NumbaError("only where it is compiled")


@overload(_number)
def _number_of_type(value):
    if value == types.uint16:  # the bits of a bfloat16 number
        return lambda value: np.uint32(np.uint32(value) << 16).view(np.float32)
    return lambda value: np.float32(value)


@compiled(fastmath=SUMS)
def _product(numbers, asked):
    """Of two vectors."""
    product = np.float32(0)
    for element in range(len(asked)):
        product += _number(numbers[element]) * asked[element]
    return product


@compiled()
def _asked_of(queries, bounds):
    """As `reference.asked_of`, in fp32; `bounds` is whether summaries are these."""
    num_sequences, group, head_size = queries.shape
    asked = np.empty((num_sequences, group, head_size * (2 if bounds else 1)), np.float32)
    for sequence in range(num_sequences):
        for nth in range(group):
            for element in range(head_size):
                number = _number(queries[sequence, nth, element])
                if bounds:
                    asked[sequence, nth, element] = min(number, np.float32(0))
                    asked[sequence, nth, head_size + element] = max(number, np.float32(0))
                else:
                    asked[sequence, nth, element] = number
    return asked


@compiled()
def _fill_scores(asked, summaries, scales, page_table, num_pages, mean, scores):
    """[S, W] scores of the pages that there are.

    asked: [S, G, length] fp32 what is multiplied with each part of a page's summary; summaries:
    [any, parts * length]; scales: [any] or [0].
    """
    num_sequences, width = page_table.shape
    _, group, length = asked.shape
    step = LINE // summaries.itemsize
    for place in range(num_sequences * width):
        sequence, column = place // width, place % width
        later, its_column = (place + AHEAD) // width, (place + AHEAD) % width
        if later < num_sequences and its_column < num_pages[later]:
            summary = summaries[page_table[later, its_column]]
            for element in range(0, len(summary), step):
                _ask_for(summary, element)
        if column >= num_pages[sequence]:
            continue
        page = page_table[sequence, column]
        joined = np.float32(0 if mean else -np.inf)
        for nth in range(group):
            best = np.float32(-np.inf)
            for start in range(0, summaries.shape[1], length):
                part = summaries[page, start : start + length]
                best = max(best, _product(part, asked[sequence, nth]))
            joined = joined + best if mean else max(joined, best)
        if len(scales):
            joined *= scales[page]
        scores[sequence, column] = joined + np.float32(0)  # no -0.0, which would be below 0.0


@compiled()
def _lowest_of(numbers, wanted):
    """The `wanted` highest's lowest: bit by bit, since that many can be counted at once."""
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
    """[S, most] the pages with the highest scores, in their order; of equals the later ones."""
    for sequence in range(len(page_table)):
        count, read = num_pages[sequence], num_read[sequence]
        found = scores[sequence, :count]
        found[:num_first] = np.inf
        found[max(0, count - num_last) :] = np.inf
        ranked = found.view(np.int32)  # in the order of the scores, once negative ones are turned
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
    queries, summaries, page_table, num_pages, num_read, scales, means, mean, first, last, chosen
):
    """In one call: each takes as long as some hundred pages."""
    asked = _asked_of(queries, not means)
    scores = np.empty(page_table.shape, np.float32)
    _fill_scores(asked, summaries, scales, page_table, num_pages, mean, scores)
    _take_highest(scores, page_table, num_pages, num_read, first, last, chosen)


def choose_pages(
    queries: Tensor,
    summaries: Tensor,
    page_table: Tensor,
    num_pages: Tensor,
    num_read: Tensor,
    choice: Choice,
    scales: Tensor | None = None,
) -> Tensor:
    """As `reference.choose_pages`; with many threads, of a chunk's queries, or in fp16 that."""
    in_torch = queries.shape[1] > MOST_QUERIES or torch.get_num_threads() > MOST_THREADS
    if in_torch or summaries.dtype not in VIEWS or queries.dtype not in VIEWS:
        return twin(page_choice.choose_pages)(
            queries, summaries, page_table, num_pages, num_read, choice, scales
        )
    chosen = torch.zeros((len(page_table), choice.most), dtype=torch.int32)
    _choose(
        _numbers(queries),
        _numbers(summaries),
        _numbers(page_table),
        _numbers(num_pages),
        _numbers(num_read),
        _numbers(NO_SCALES if scales is None else scales),
        bool(choice.num_means),
        choice.mean,
        choice.num_first,
        choice.num_last,
        chosen.numpy(),
    )
    return chosen


def _numbers(tensor: Tensor) -> Any:
    """A contiguous array of the same elements, of a type that numpy has."""
    return tensor.view(VIEWS.get(tensor.dtype, tensor.dtype)).contiguous().numpy()
