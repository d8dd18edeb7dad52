"""Batched events, and batched layers of an event, leave the pages that single ones leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.accelerator import ACCELERATOR, Operators, launched
from tests.event_cases import (
    BLOCK_SIZE,
    CPU,
    GROUP,
    NUM_HEADS,
    SCALE,
    left_in,
    make_pool,
    make_weights,
)
from tests.policies.cases import HEAD_SIZE, NUM_LAYERS, POLICIES, Shape, make_pipeline
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression import guard
from vllm_kvcompress.compression.batch import (
    MAX_BATCH_TOKENS,
    MAX_HELD_WINDOWS,
    EventBatch,
    group_events,
    max_batch_tokens,
)
from vllm_kvcompress.compression.event import Event, LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.registry import policies
from vllm_kvcompress.policies.snapkv import SnapKV
from vllm_kvcompress.scheduling.plan import EventPlan, Observation, Spans

SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
LENGTHS = (43, 47, 44, 50)  # tails of 3, 3, none and 2
LATER = 12  # tokens until the next events
BLOCKS_EACH = 40


@dataclass
class Step:
    """Requests whose events come in the same steps.

    Attributes:
        pipeline: of all.
        pool: of `BLOCKS_EACH` blocks for each.
        lengths: tokens of each at the first event.
        in_place: later events stay in the blocks of the first ones.
        protected: tokens that requests protect, by index.
        num_batches: that the last step ran.
        at_once: layers that its first one ran together.
    """

    pipeline: Pipeline
    pool: PagePool
    lengths: tuple[int, ...] = LENGTHS
    runner: EventRunner = field(init=False)
    blocks: list[list[int]] = field(init=False)
    kept: list[tuple[int, int]] = field(init=False)
    in_place: bool = False
    protected: dict[int, Spans] = field(default_factory=dict)
    num_batches: int = 0
    at_once: int = 0

    def __post_init__(self) -> None:
        device, dtype = self.pool.device, self.pool.pages.dtype
        windows = QueryWindows(NUM_LAYERS, self.pipeline.needs.window_size, device)
        pipelines = {self.pipeline.name: self.pipeline}
        weights = make_weights(device, dtype)
        self.runner = EventRunner(PageTables(self.pool), windows, pipelines, weights)
        order = torch.randperm(
            BLOCKS_EACH * len(self.lengths), generator=torch.Generator().manual_seed(3)
        )
        self.blocks = order.view(len(self.lengths), BLOCKS_EACH).tolist()
        self.kept = [(0, 0)] * len(self.lengths)
        generator = torch.Generator().manual_seed(5)
        for blocks, length in zip(self.blocks, self.lengths, strict=True):
            self._write(blocks, length + LATER, generator)

    def _write(self, blocks: list[int], num_tokens: int, generator: torch.Generator) -> None:
        pool, count = self.pool, -(-num_tokens // BLOCK_SIZE)
        shape = (count, NUM_LAYERS * NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
        drawn = torch.randn(2, *shape, generator=generator).to(pool.pages.dtype)
        behind = torch.arange(count * BLOCK_SIZE).view(-1, 1, BLOCK_SIZE, 1) >= num_tokens
        keys, values = (part.masked_fill(behind, torch.nan).flatten(0, 1) for part in drawn)
        pages = pool.fresh_pages(upload(blocks[:count], pool.device))
        pool.write(pages, upload(keys, pool.device), upload(values, pool.device))

    def plan(self, index: int, position: int) -> EventPlan:
        first, resident = self.kept[index]
        least = self.pipeline.least_blocks(self.pool.page_shape)
        num_kept = max(least, 4 + index % 2)
        start = 20 if resident == 0 else 30
        return EventPlan(
            request_id=f"r{index}",
            group=0,
            policy=self.pipeline.name,
            trigger="prompt",
            position=position,
            window_size=min(self.pipeline.needs.window_size, position),
            first_block=first,
            end_block=position // BLOCK_SIZE,
            resident_blocks=resident,
            fresh_block_ids=()
            if self.in_place and resident
            else tuple(self.blocks[index][start : start + num_kept]),
            protected=self.protected.get(index, ()),
        )

    def run(self, together: bool, later: int = 0, in_step: bool = True) -> list[Event]:
        """Every request's event after `later` more tokens than at first.

        Args:
            together: as a step runs them, and not one by one.
            later: tokens.
            in_step: windows lie in the step's own batch.
        """
        runner, positions = self.runner, [length + later for length in self.lengths]
        plans = [self.plan(index, position) for index, position in enumerate(positions)]
        rows = torch.tensor(self.blocks, dtype=torch.int32)
        if later:
            slots = np.array([runner.tables.slots[plan.request_id] for plan in plans])
            table = upload(rows, self.pool.device)
            which = np.arange(len(slots))
            runner.tables.extend_tails(slots, which, table, np.array(positions))
        events = [
            runner.begin(plan, upload(row, self.pool.device))
            for plan, row in zip(plans, rows, strict=True)
        ]
        size = max(plan.window_size for plan in plans)
        where = None
        if size:
            seen = [Observation(0, p.position - p.window_size, p.window_size) for p in plans]
            observed = [(p.request_id, index * size, seen[index]) for index, p in enumerate(plans)]
            where = runner.windows.locate(observed, plans if in_step else ())
        in_step_ids = () if where is None else where.in_step
        batches = runner.batches(events, in_step_ids)
        if not together:
            batches = [batch for event in events for batch in runner.batches([event], in_step_ids)]
        generator = torch.Generator().manual_seed(later)
        for layer in range(NUM_LAYERS):
            if where is not None:
                shape = (len(plans) * size, NUM_HEADS * GROUP, HEAD_SIZE)
                queries = 2 * torch.randn(shape, generator=generator).to(self.pool.pages.dtype)
                runner.windows.record(layer, upload(queries, self.pool.device), where)
            batches = guard.run_layer(runner, batches, layer, SCALE)
        self.num_batches, self.at_once = len(batches), len(batches[0].layers[0].layers)
        for event in events:
            runner.finish(event)
        self.kept = [(plan.end_block, plan.num_kept_blocks) for plan in plans]
        return events

    def forget(self) -> None:
        """Makes the requests uncompressed again."""
        for index in range(len(self.lengths)):
            self.runner.tables.release(f"r{index}")
        self.kept = [(0, 0)] * len(self.lengths)

    def left(self) -> list[list[dict[str, Tensor]]]:
        """Returns by request and layer what its events have left."""
        return [left_in(self.runner.tables, f"r{index}") for index in range(len(self.lengths))]


def make_step(
    policy: str,
    directory: Path,
    kind: type[PagePool] = PackedPagePool,
    device: torch.device = CPU,
    lengths: tuple[int, ...] = LENGTHS,
    **params: object,
) -> Step:
    pipeline = make_pipeline(policy, SHAPE, directory, **params)
    pool = make_pool(kind, device, num_blocks=BLOCKS_EACH * len(lengths))
    return Step(pipeline, pool, lengths)


def check_same(one: Step, other: Step) -> None:
    """Asserts equal pages with equal tokens; computed numbers may differ by rounding."""
    for ours, theirs in zip(one.left(), other.left(), strict=True):
        for layer, expected in zip(ours, theirs, strict=True):
            assert torch.equal(layer["counts"], expected["counts"])
            assert torch.equal(layer["pages"], expected["pages"])
            for name in ("keys", "values", "carried"):
                torch.testing.assert_close(
                    layer[name], expected[name], rtol=1e-4, atol=1e-5, equal_nan=True
                )


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *((policy, PackedPagePool) for policy in POLICIES),
        *((policy, InterleavedPagePool) for policy in ("h2o+obcache", "d2o", "kvslimmer")),
    ],
)
def test_batched_events_keep_what_single_events_keep(
    policy: str, kind: type[PagePool], tmp_path: Path
) -> None:
    """First events and later ones; layer by layer and all layers at once."""
    together, layers, alone = (make_step(policy, tmp_path, kind) for _ in range(3))
    alone.runner.max_tokens = 0
    pipeline = together.pipeline
    one_layer_at_a_time = (
        pipeline.merger is not None or not pipeline.batches or pipeline.needs.output_weight
    )
    for later, in_step in ((0, True), (LATER, False)):
        events = together.run(True, later, in_step) + layers.run(False, later, in_step)
        alone.run(False, later, in_step)
        assert not any(event.error for event in events)
        if pipeline.batches and pipeline.needs.window_size < LENGTHS[0]:
            # Later requests may hold too different numbers of tokens.
            assert together.num_batches <= (3 if later else 1)
        assert (layers.at_once, alone.at_once) == (1 if one_layer_at_a_time else NUM_LAYERS, 1)
        assert together.at_once == (1 if one_layer_at_a_time else NUM_LAYERS)
        check_same(together, alone)
        check_same(layers, alone)


@pytest.mark.parametrize("policy", ["attention", "adakv+criticalkv", "spans+headkv", "keydiff"])
def test_protected_tokens_of_some_change_nothing_for_others(policy: str, tmp_path: Path) -> None:
    together, alone, plain = (make_step(policy, tmp_path) for _ in range(3))
    together.protected = alone.protected = {1: ((2, 7),), 3: ((0, 4), (45, 47))}
    for later in (0, LATER):
        assert not any(event.error for event in together.run(True, later))
        alone.run(False, later)
        plain.run(True, later)
        check_same(together, alone)
    ours, others = together.left(), plain.left()
    for index in (0, 2):
        for layer, expected in zip(ours[index], others[index], strict=True):
            assert torch.equal(layer["keys"], expected["keys"])
    assert not torch.equal(ours[1][0]["keys"], others[1][0]["keys"])


def test_every_policy_but_expected_is_batched(tmp_path: Path) -> None:
    alone = {p for p in POLICIES if not make_pipeline(p, SHAPE, tmp_path).batches}
    assert alone == {"expected", "expected+adakv"}
    assert {name for policy in POLICIES for name in policy.split("+")} >= set(policies())


@pytest.mark.parametrize("device", [CPU, ACCELERATOR])
@pytest.mark.parametrize("policy", ["snapkv", "h2o+criticalkv", "kvslimmer", "momentkv"])
def test_operators_per_layer_do_not_grow_with_requests(
    policy: str, device: torch.device, tmp_path: Path
) -> None:
    """Only a step's own part, outside of layers, grows with its requests."""
    kind = PackedPagePool if device == CPU else InterleavedPagePool
    counts = []
    for number in (1, 2, 8):
        step = make_step(policy, tmp_path, kind, device, (43, 45, 44, 46, 47, 45, 44, 43)[:number])
        step.runner.layers_alike = False
        with launched():
            step.run(True)  # page tables grow
            step.forget()
            with count_operators(step.runner) as operators:
                step.run(True)
        counts.append(operators.count)
    assert 0 < counts[0] < counts[1] == counts[2] < 1.5 * counts[0]


@pytest.mark.parametrize("device", [CPU, ACCELERATOR])
@pytest.mark.parametrize("policy", ["snapkv", "snapkv+criticalkv", "spans+headkv"])
def test_operators_hardly_grow_with_layers(
    policy: str, device: torch.device, tmp_path: Path
) -> None:
    """All layers take hardly more than one, since their queries are held until the last."""
    kind = PackedPagePool if device == CPU else InterleavedPagePool
    counts = []
    for alike in (True, False):
        step = make_step(policy, tmp_path, kind, device, (43,))
        step.runner.layers_alike = alike
        with launched(), count_operators(step.runner) as operators:
            step.run(True)
        counts.append(operators.count)
    assert 0 < counts[0] < 1.3 * counts[1] / NUM_LAYERS


@contextmanager
def count_operators(runner: EventRunner) -> Iterator[Operators]:
    """Counts operators of all layers, without what a step does once."""
    operators, run_layer = Operators(), runner.run_layer

    def counting(*args: Any) -> None:
        with operators:
            run_layer(*args)

    with mock.patch.object(runner, "run_layer", counting):
        yield operators


@dataclass(frozen=True)
class Choosy(SnapKV):
    """Fails for the requests of certain lengths, and allows batches."""

    name = "choosy"
    batches = True

    def score(self, view: LayerView) -> Tensor:
        if 1 in view.layers and bool((view.lengths == 12 * BLOCK_SIZE).any()):
            raise RuntimeError("not twelve blocks")
        return super().score(view)


def test_failing_request_leaves_the_rest_of_its_batch_unchanged() -> None:
    """The others keep what they keep without it, also behind the layer at which it fails."""
    pipeline = Choosy(window_size=5).pipeline().bind(NUM_LAYERS, NUM_HEADS, 4, BLOCK_SIZE)
    steps = [
        Step(pipeline, make_pool(PackedPagePool, num_blocks=BLOCKS_EACH * 4)) for _ in range(2)
    ]
    failed = [
        [event.error is not None for event in step.run(together)]
        for step, together in zip(steps, (True, False), strict=True)
    ]
    assert failed[0] == failed[1] == [False, False, False, True]
    assert steps[0].num_batches == 4
    check_same(*steps)


@pytest.mark.parametrize("in_step", [True, False])
def test_failing_layer_leaves_earlier_layers_unchanged(in_step: bool) -> None:
    """Layers that were batched with it keep what they keep without it."""
    pipeline = Choosy(window_size=5).pipeline().bind(NUM_LAYERS, NUM_HEADS, 4, BLOCK_SIZE)
    layers, alone = (
        Step(pipeline, make_pool(PackedPagePool, num_blocks=BLOCKS_EACH), (50,)) for _ in range(2)
    )
    alone.runner.max_tokens = 0
    for step in (layers, alone):
        (event,) = step.run(False, in_step=in_step)
        assert isinstance(event.error, RuntimeError)
    check_same(layers, alone)
    untouched = Step(
        SnapKV(window_size=5).pipeline().bind(NUM_LAYERS, NUM_HEADS, 4, BLOCK_SIZE),
        make_pool(PackedPagePool, num_blocks=BLOCKS_EACH),
        (50,),
    )
    untouched.run(False, in_step=in_step)
    same = [
        torch.equal(ours["keys"], theirs["keys"])
        for ours, theirs in zip(layers.left()[0], untouched.left()[0], strict=True)
    ]
    assert same == [True, False, False]


class Inherited(SnapKV):
    """A policy that inherits from another, so its batching is unknown."""


def test_events_are_grouped_by_length_and_padding() -> None:
    assert not Inherited().pipeline().batches
    assert SnapKV().pipeline().batches
    pipeline = SnapKV(window_size=5).pipeline().bind(NUM_LAYERS, NUM_HEADS, 4, BLOCK_SIZE)
    lengths = (43, 44, 43, 63, 83, 43)
    step = Step(pipeline, make_pool(PackedPagePool, num_blocks=BLOCKS_EACH * 6), lengths)
    events = [
        step.runner.begin(
            step.plan(index, length), torch.tensor(step.blocks[index], dtype=torch.int32)
        )
        for index, length in enumerate(lengths)
    ]

    def groups(in_step_ids: set[str], most_tokens: int) -> list[list[int]]:
        return [
            [events.index(e) for e in some]
            for some in group_events(events, in_step_ids, most_tokens)
        ]

    everybody = {event.plan.request_id for event in events}
    # By length, and by room for padded tokens.
    assert groups(everybody, 1000) == [[0, 2, 5, 1], [3], [4]]
    assert groups(everybody, 99) == [[0, 2], [5, 1], [3], [4]]
    assert groups(everybody - {"r2"}, 1000) == [[0, 5, 1], [3], [4], [2]]
    events[2].fall_back(pipeline, RuntimeError("it failed at the start"))
    assert groups(everybody, 1000) == [[0, 5, 1], [3], [4], [2]]
    assert groups(everybody, 0) == [[0], [5], [1], [3], [4], [2]]


def most_at_once(batch: EventBatch) -> int:
    return max(len(each.layers) for each in batch.layers)


def test_number_of_batched_layers_depends_on_length_and_held_queries(tmp_path: Path) -> None:
    """Short events hold queries of more layers; a step's total is limited."""
    lengths = tuple(43 + 16 * index for index in range(14))
    step = make_step("snapkv", tmp_path, lengths=(43,) * len(lengths))

    def layers_per_batch(**settings: object) -> list[int]:
        with mock.patch.multiple(step.runner, **{"layers_alike": True} | settings):
            events = [
                step.runner.begin(step.plan(index, length), torch.zeros(64, dtype=torch.int32))
                for index, length in enumerate(lengths)
            ]
            batches = [batch for event in events for batch in step.runner.batches([event])]
            return [most_at_once(batch) for batch in batches]

    assert layers_per_batch() == [3] * 14
    assert layers_per_batch(max_tokens=200) == [3, 3, 2, 2, *[1] * 10]
    assert layers_per_batch(max_tokens=0) == layers_per_batch(layers_alike=False) == [1] * 14
    assert layers_per_batch(observer=mock.Mock()) == [1] * 14


def test_layers_are_divided_evenly(tmp_path: Path) -> None:
    events_of = make_step("h2o", tmp_path, lengths=(43,))
    (event,) = [events_of.runner.begin(events_of.plan(0, 43), torch.zeros(64, dtype=torch.int32))]
    for at_once, wanted in ((1, [1, 1, 1]), (2, [1, 2]), (3, [3]), (8, [3])):
        batch = EventBatch.of([event], events_of.pool, at_once)
        runs = list(dict.fromkeys(each.layers for each in batch.layers))
        assert [len(layers) for layers in runs] == wanted
        assert [layer for layers in runs for layer in layers] == [0, 1, 2]
        pages = torch.cat([batch.layers[layers.start].pages for layers in runs])
        states = torch.cat([batch.layers[layers.start].state_pages for layers in runs])
        assert sorted(torch.cat([pages, states]).tolist()) == sorted(event.fresh_pages.tolist())
        for layer, each in enumerate(batch.layers):
            kept_pages = event.kept_pages(layer).tolist()
            assert set(kept_pages) <= set(each.pages.tolist())


def test_held_queries_are_limited(tmp_path: Path) -> None:
    """Events whose queries are gone after each layer share the limit; ring buffers keep others."""
    step = make_step("snapkv", tmp_path, lengths=(43,) * 14)
    events = [
        step.runner.begin(step.plan(index, 43 + 14 * index), torch.zeros(80, dtype=torch.int32))
        for index in range(14)
    ]
    names = [event.plan.request_id for event in events]
    with mock.patch("vllm_kvcompress.compression.batch.MAX_PADDING", 1.0):
        held, kept = step.runner.batches(events, names), step.runner.batches(events)
    num_layers = [most_at_once(batch) for batch in held]
    assert num_layers == [2] * 10 + [3] * 4
    assert sum(num_layers) == MAX_HELD_WINDOWS
    assert [most_at_once(batch) for batch in kept] == [NUM_LAYERS] * 14


def test_batches_on_cpus_are_limited_in_bytes(tmp_path: Path) -> None:
    pool = make_step("snapkv", tmp_path).pool
    token_bytes = NUM_HEADS * HEAD_SIZE * 4
    assert max_batch_tokens(pool) == MAX_BATCH_TOKENS
    for most, wanted in ((token_bytes * 100, 100), (token_bytes * 100 - 1, 99)):
        with mock.patch("vllm_kvcompress.compression.batch.MAX_BATCH_BYTES", most):
            assert max_batch_tokens(pool) == wanted
            assert max_batch_tokens(make_pool(InterleavedPagePool, ACCELERATOR)) == MAX_BATCH_TOKENS


def test_layers_with_other_rotary_embeddings_are_not_batched() -> None:
    rotary = [Rotary(torch.tensor(angles)) for angles in ([1.0, 0.5], [1.0, 0.5], [1.0, 0.25])]
    first, same, other = (LayerWeights(rotary=each) for each in rotary)
    assert first.rotates_like(same)
    assert not first.rotates_like(other)
    assert not first.rotates_like(LayerWeights(rotary=replace(rotary[0], halves=False)))
    assert not first.rotates_like(LayerWeights())
    assert LayerWeights().rotates_like(LayerWeights())
