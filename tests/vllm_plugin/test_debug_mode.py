"""The debug mode finds every block that a request reads or writes and does not own."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.step_cases import PER_BLOCK, REQUESTS, SIZE, Step, make_pool
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.errors import ConfigError, InvariantError
from vllm_kvcompress.policies.registry import resolve
from vllm_kvcompress.scheduling.plan import BlockTags, EventPlan, StepPlan
from vllm_kvcompress.vllm_plugin.debug_mode import switched_on
from vllm_kvcompress.vllm_plugin.worker_side.access_checks import POISON, WorkerChecks
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression, StepWork


class Checked:
    """A step of four requests, three of them compressed, and whose blocks are whose."""

    def __init__(self, policy: str = "snapkv") -> None:
        self.step = Step(resolve(policy, {}), make_pool(PackedPagePool))
        self.group = GroupCompression(0, self.step.runner, {}, [], 0.0)
        lengths = [request.num_tokens for request in REQUESTS]
        slots = []
        for row, request in enumerate(REQUESTS):
            places = range(request.num_tokens - request.num_queries, request.num_tokens)
            blocks = self.step.block_table[row]
            slots += [int(blocks[place // SIZE]) * SIZE + place % SIZE for place in places]
        self.common = SimpleNamespace(
            num_reqs=len(REQUESTS),
            query_start_loc_cpu=torch.from_numpy(self.step.starts),
            seq_lens_cpu_upper_bound=torch.tensor(lengths),
            block_table_tensor=torch.from_numpy(self.step.block_table),
            slot_mapping=torch.tensor(slots),
        )
        self.work = StepWork(compressed=[self.step.read()])
        self.read = {request.name: self.blocks_of(row) for row, request in enumerate(REQUESTS)}

    def blocks_of(self, row: int) -> set[int]:
        """What a request reads, head by head."""
        request, tables = REQUESTS[row], self.step.runner.tables
        if request.kept is None:
            count = math.ceil(request.num_tokens / SIZE)
            return set(self.step.block_table[row, :count].tolist())
        slot, found = tables.slots[request.name], set()
        for layer, counts in enumerate(request.kept):
            for head, count in enumerate(counts):
                width = count + int(tables.tails.num_pages[slot])
                row = tables.rows.read(torch.tensor([slot]), width)[layer, 0, head]
                pages = row[:width].tolist()
                found |= {page // PER_BLOCK for page in pages}
        return found

    def check(self, owned: dict[str, set[int]]) -> None:
        checks = WorkerChecks()
        tags = BlockTags({(0, name): frozenset(blocks) for name, blocks in owned.items()})
        checks.begin_step(StepPlan(tags=tags), [])
        names = [request.name for request in REQUESTS]
        checks.check(self.group, self.work, names, self.common)


@pytest.fixture
def checked() -> Checked:
    return Checked()


def test_reading_own_blocks_raises_nothing(checked: Checked) -> None:
    checked.check(checked.read)


@pytest.mark.parametrize("name", [request.name for request in REQUESTS])
def test_any_block_of_another_request_raises(checked: Checked, name: str) -> None:
    for block in checked.read[name]:
        owned = {**checked.read, name: checked.read[name] - {block}}
        with pytest.raises(InvariantError, match=rf"{name} .* found \[{block}\] besides"):
            checked.check(owned)


def test_a_page_in_two_heads_raises(checked: Checked) -> None:
    (batch,) = checked.work.compressed
    assert batch is not None
    batch.page_table[0, 1, 0] = batch.page_table[0, 0, 0]
    with pytest.raises(InvariantError, match="two heads have the same"):
        checked.check(checked.read)


def test_two_writers_of_a_block_raise(checked: Checked) -> None:
    checked.common.slot_mapping[-1] = checked.common.slot_mapping[0]
    owned = {name: set(range(100)) for name in checked.read}
    with pytest.raises(InvariantError, match="expected one request to write to it"):
        checked.check(owned)


def test_policy_state_of_another_request_raises() -> None:
    checked = Checked("momentkv")
    tables = checked.step.runner.tables
    state = set((tables.state[:, tables.slots["a"]] // PER_BLOCK).flatten().tolist())
    whole = {**checked.read, **{n: checked.read[n] | set(range(100)) for n in ("b", "c")}}
    checked.check({**whole, "a": whole["a"] | state})
    with pytest.raises(InvariantError, match="a reads policy state of"):
        checked.check({**whole, "a": whole["a"] - (state - whole["a"])})


@pytest.mark.parametrize(("fresh", "message"), [((40,), "keeps tokens in"), ((), "compresses")])
def test_an_event_on_blocks_of_another_request_raises(
    checked: Checked, fresh: tuple[int, ...], message: str
) -> None:
    row = 1
    plan = EventPlan("uncompressed", 0, "policy", "prompt", 3, 0, 0, 1, 0, fresh)
    blocks = torch.from_numpy(checked.step.block_table[row, :1].astype(np.int64))
    if not fresh:
        blocks = blocks + 1
    checked.work.events = [SimpleNamespace(plan=plan, blocks=blocks)]
    with pytest.raises(InvariantError, match=message):
        checked.check(checked.read)


@pytest.mark.parametrize("kind", [PackedPagePool, InterleavedPagePool])
def test_blocks_without_an_owner_are_poisoned(kind: type[PagePool]) -> None:
    pool = make_pool(kind)
    pool.pages.fill_(1)
    tags = BlockTags(poisoned=(3, 7))
    WorkerChecks().begin_step(StepPlan(tags=tags), [pool])
    blocks = torch.arange(len(pool.pages)) // PER_BLOCK
    poisoned = (blocks == 3) | (blocks == 7)
    pages = torch.arange(len(pool.pages))
    assert bool(pool.keys(pages[poisoned], 0).isnan().all())
    assert bool((pool.values(pages[poisoned], 0) == POISON).all())
    assert bool((pool.pages[~poisoned] == 1).all())


def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPRESS_CHECK", "yes")
    with pytest.raises(ConfigError, match="KVCOMPRESS_CHECK=yes: expected 1 or 0"):
        switched_on()
