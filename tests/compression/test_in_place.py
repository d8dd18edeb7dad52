"""Events in place keep what events keep that write to fresh blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compression.test_event_batches import BLOCKS_EACH, LATER, LENGTHS, Step, make_step
from tests.event_cases import BLOCK_SIZE, NUM_HEADS, Request, left_by, make_pool
from tests.policies.cases import NUM_LAYERS, POLICIES, Shape, make_pipeline
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.policies.h2o import H2O
from vllm_kvcompress.policies.keydiff import KeyDiff

POSITIONS = (70, 103, 115, 140)
PER_BLOCK = NUM_LAYERS * NUM_HEADS
SHAPE = Shape(pages=(9, 9), group=2, block_size=BLOCK_SIZE)
# Their layers would have to take pages of others, so their events take fresh blocks.
LAYER_DEPENDENT = {
    policy
    for policy in POLICIES
    if {*policy.split("+")} & {"knorm", "pyramidkv", "headkv", "duoattention"}
}
ANY_ORDER = {"knorm", "keydiff", "keydiff+adakv"}


def entries_of(layer: dict[str, Tensor], pipeline: Pipeline) -> list[list[tuple[float, ...]]]:
    """Returns of every head its tokens with the policy state of each, in a plain loop."""
    counts = [int(count) for count in layer["counts"]]
    num_entries = sum(counts) * BLOCK_SIZE
    keys, values = layer["keys"].flatten(0, 1), layer["values"].flatten(0, 1)
    heads, entry = [], 0
    for count in counts:
        rows = []
        for _ in range(count * BLOCK_SIZE):
            row = [*keys[entry].tolist(), *values[entry].tolist()]
            for number in range(len(pipeline.token_state)):
                row.append(float(layer["carried"][number * num_entries + entry]))
            rows.append(tuple(row))
            entry += 1
        heads.append(rows)
    return heads


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *((policy, PackedPagePool) for policy in POLICIES if policy not in LAYER_DEPENDENT),
        *((policy, InterleavedPagePool) for policy in ("keydiff+adakv", "h2o", "kvslimmer")),
    ],
)
def test_events_in_place_keep_what_fresh_blocks_would(
    policy: str, kind: type[PagePool], tmp_path: Path
) -> None:
    """Every policy: the same tokens and state; in the same order unless the policy allows any."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    fresh, ours = (
        Request(pipeline, make_pool(kind), "tokens", POSITIONS, in_place)
        for in_place in (False, True)
    )
    for position in POSITIONS:
        expected, event = fresh.compress(position), ours.compress(position)
        assert event.plan.in_place == (position != POSITIONS[0])
        assert event.layer_pages == expected.layer_pages
        for one, other in zip(left_by(ours), left_by(fresh), strict=True):
            assert torch.equal(one["counts"], other["counts"])
            found, wanted = entries_of(one, pipeline), entries_of(other, pipeline)
            if pipeline.any_order:
                found, wanted = ([sorted(head) for head in each] for each in (found, wanted))
                torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]))
            else:
                torch.testing.assert_close(one["carried"], other["carried"], equal_nan=True)
            assert [[row[:16] for row in head] for head in found] == [
                [row[:16] for row in head] for head in wanted
            ]


@pytest.mark.parametrize(
    ("policy", "kind", "positions"),
    [
        *(
            (policy, PackedPagePool, (70, 103))
            for policy in POLICIES
            if policy not in LAYER_DEPENDENT
        ),
        *(
            (policy, InterleavedPagePool, positions)
            for policy in ("keydiff+adakv", "h2o", "kvslimmer")
            for positions in ((70, 103), (70, 78, 147))
        ),
    ],
)
def test_events_beside_the_tail_keep_what_fresh_blocks_would(
    policy: str, kind: type[PagePool], positions: tuple[int, ...], tmp_path: Path
) -> None:
    """Every policy: the same tokens and state, in blocks of which later ones are read as well.

    At 78 tokens the second event reads and writes the same ones.
    """
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    fresh, ours = (
        Request(pipeline, make_pool(kind), positions=positions, split=split) for split in (1, 7)
    )
    for position in positions:
        expected, event = fresh.compress(position), ours.compress(position)
        assert event.plan.overwrites
        assert not event.plan.in_place
        assert event.plan.num_kept_blocks == expected.plan.num_kept_blocks
        for layer, (one, other) in enumerate(zip(left_by(ours), left_by(fresh), strict=True)):
            for name in ("counts", "keys", "values"):
                assert torch.equal(one[name], other[name])
            torch.testing.assert_close(one["carried"], other["carried"], equal_nan=True)
            beside = [page for page in one["pages"] if page // PER_BLOCK in event.plan.beside_tail]
            assert {int(page) % PER_BLOCK // NUM_HEADS for page in beside} <= {layer}


def test_layer_dependent_policies_are_those_listed(tmp_path: Path) -> None:
    differ = {p for p in POLICIES if make_pipeline(p, SHAPE, tmp_path).layer_dependent}
    assert differ == LAYER_DEPENDENT


def test_order_free_policies_are_those_listed(tmp_path: Path) -> None:
    """No policy that looks at neighbours, recent tokens or pairs."""
    assert {p for p in POLICIES if make_pipeline(p, SHAPE, tmp_path).any_order} == ANY_ORDER
    assert H2O(recent_fraction=0.0).pipeline().any_order
    assert not H2O().pipeline().any_order


@dataclass(frozen=True)
class Foreign(KeyDiff):
    """Inherits from one that allows any order, and says nothing itself."""

    name = "foreign"


def test_subclass_has_to_allow_any_order_itself() -> None:
    assert KeyDiff().pipeline().any_order
    assert not Foreign().pipeline().any_order


@pytest.mark.parametrize("policy", ["keydiff", "keydiff+adakv", "h2o", "momentkv"])
@pytest.mark.parametrize("kind", [PackedPagePool, InterleavedPagePool])
def test_nothing_but_former_kept_pages_is_written(
    policy: str, kind: type[PagePool], tmp_path: Path
) -> None:
    """Layer by layer: pages of layers that are still to run stay, and those behind the tail."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    one = Request(pipeline, make_pool(kind), "tokens", POSITIONS, in_place=True)
    first = one.compress(POSITIONS[0])
    allowed = [set(first.kept_pages(layer).tolist()) for layer in range(NUM_LAYERS)]
    per_layer = [
        set(first.fresh_pages.tolist()) if any(first.state_pages) else pages for pages in allowed
    ]
    for position in POSITIONS[1:]:
        watched = Watched(one)
        one.compress(position)
        for layer, written in enumerate(watched.end()):
            assert written
            assert written <= per_layer[layer]


class Watched:
    """Records which pages each layer of an event writes to."""

    def __init__(self, request: Request) -> None:
        self.written: list[set[int]] = []
        self._pages, self._runner = request.pool.pages, request.runner
        self._run_layer = self._runner.run_layer
        self._runner.max_tokens = 0  # layer by layer
        self._runner.run_layer = self._watch  # type: ignore[method-assign, assignment]

    def _watch(self, *args: Any) -> None:
        before = self._pages.clone()
        self._run_layer(*args)
        differs = (self._pages.view(torch.int32) != before.view(torch.int32)).any(dim=1)
        self.written.append(set(differs.nonzero()[:, 0].tolist()))

    def end(self) -> list[set[int]]:
        self._runner.run_layer = self._run_layer  # type: ignore[method-assign]
        return self.written


def test_as_many_tokens_move_as_holes_are_filled(tmp_path: Path) -> None:
    """Keydiff: tokens that stay are not written, however many are kept."""
    one = Request(
        make_pipeline("keydiff", SHAPE, tmp_path),
        make_pool(PackedPagePool),
        "tokens",
        POSITIONS,
        in_place=True,
    )
    one.compress(POSITIONS[0])
    for position in POSITIONS[1:]:
        before = [layer["keys"].clone() for layer in left_by(one)]
        event = one.compress(position)
        num_new = event.num_full * BLOCK_SIZE
        for old, layer in zip(before, left_by(one), strict=True):
            moved = (old != layer["keys"]).any(dim=2).flatten().unflatten(0, (NUM_HEADS, -1))
            assert 0 < int(moved.sum(dim=1).max()) <= num_new < old.shape[0] * BLOCK_SIZE


@dataclass(frozen=True)
class Choosy(KeyDiff):
    """Fails at the second event of two of four requests, in the second layer."""

    name = "choosy"
    batches = True
    any_order = True

    def score(self, view: LayerView) -> Tensor:
        scores = super().score(view)
        if 1 in view.layers and bool((view.lengths == FAILING_LENGTH).any()):
            raise RuntimeError("not that length")
        return scores


FAILING_LENGTH = (5 + 3) * BLOCK_SIZE  # kept blocks of the odd requests, and full ones since


def test_failing_request_leaves_the_rest_of_its_batch_unchanged() -> None:
    """What failed together runs again alone, on sources that nothing has been written to."""
    pipeline = Choosy().pipeline().bind(NUM_LAYERS, NUM_HEADS, 4, BLOCK_SIZE)
    steps = []
    for together in (True, False):
        pool = make_pool(PackedPagePool, num_blocks=BLOCKS_EACH * len(LENGTHS))
        step = Step(pipeline, pool, in_place=True)
        step.run(together)
        events = step.run(together, LATER)
        steps.append((step, [event.error is not None for event in events]))
    (one, failed), (other, failed_alone) = steps
    assert failed == failed_alone == [False, True, False, True]
    for ours, theirs in zip(one.left(), other.left(), strict=True):
        for layer, expected in zip(ours, theirs, strict=True):
            for name in ("counts", "pages", "keys", "values"):
                assert torch.equal(layer[name], expected[name])


@pytest.mark.parametrize("policy", ["keydiff+adakv", "h2o+adakv", "kvslimmer", "momentkv"])
def test_batched_events_in_place_equal_single_ones(policy: str, tmp_path: Path) -> None:
    together, alone = (make_step(policy, tmp_path) for _ in range(2))
    for step, is_batched in ((together, True), (alone, False)):
        step.in_place = True
        step.run(is_batched)
        step.run(is_batched, LATER, in_step=False)
    for ours, theirs in zip(together.left(), alone.left(), strict=True):
        for layer, expected in zip(ours, theirs, strict=True):
            assert torch.equal(layer["counts"], expected["counts"])
            for name in ("keys", "values", "carried"):
                torch.testing.assert_close(layer[name], expected[name], rtol=1e-5, atol=1e-6)


def test_state_of_a_wrong_shape_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """So the guard may run the layer again."""
    one = Request(
        make_pipeline("h2o", SHAPE, tmp_path),
        make_pool(PackedPagePool),
        "tokens",
        POSITIONS,
        in_place=True,
    )
    one.compress(POSITIONS[0])
    before, runner = one.pool.pages.clone(), one.runner
    write = runner.policy_state.write

    def short(pipeline: Pipeline, layer: int, selection: Selection, *more: Any) -> None:
        accumulated = selection.merged.accumulated
        assert accumulated is not None
        object.__setattr__(selection.merged, "accumulated", accumulated[:, :1])
        write(pipeline, layer, selection, *more)

    runner.policy_state.write = short  # type: ignore[method-assign, assignment]
    with pytest.raises(IndexError):
        one.compress(POSITIONS[1])
    assert torch.equal(one.pool.pages.view(torch.int32), before.view(torch.int32))


def test_observer_sees_what_was_there_before(tmp_path: Path) -> None:
    """Values and keys of the sources, which the event then overwrites."""
    seen: dict[bool, list[tuple[Tensor, Tensor]]] = {False: [], True: []}
    for in_place in seen:
        one = Request(
            make_pipeline("keydiff", SHAPE, tmp_path),
            make_pool(PackedPagePool),
            "tokens",
            POSITIONS[:2],
            in_place,
        )
        parts = seen[in_place]

        class Watching:
            def compressed(
                self,
                event: Event,
                layer: int,
                view: LayerView,
                values: Tensor,
                _: Selection,
                to: list[tuple[Tensor, Tensor]] = parts,
            ) -> None:
                to.append((view.kv.keys().clone(), values.clone()))

        one.runner.observer = Watching()
        one.run()
    for ours, theirs in zip(*seen.values(), strict=True):
        for our, their in zip(ours, theirs, strict=True):
            assert torch.equal(our, their)
