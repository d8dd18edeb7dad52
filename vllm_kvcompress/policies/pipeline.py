"""A policy, resolved: the parts that score, allocate, select and merge, and what they need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies.base import Merger, ModelHeads, Needs, PageShape, Scorer
from vllm_kvcompress.policies.parts.allocation import Allocator
from vllm_kvcompress.policies.parts.selection import Protection, Selector
from vllm_kvcompress.scheduling.rule import PolicyDemand, kept_below


@dataclass(frozen=True)
class Pipeline:
    """Parts that a policy string stands for.

    Attributes:
        name: the string, parts in canonical order.
        scorer: importance of tokens.
        allocator: pages per layer and head.
        selector: tokens per head.
        protection: tokens that are kept whatever their score.
        merger: merges evicted tokens; None: they are dropped.
        params: values of all parameters by name.
        repeats: whether a request may be compressed again, so that policy state is kept.
        min_window: replaces that of the parts' needs; None: they say themselves.
        span_share: part of spans that requests protect which every head keeps; None: as much of
            each as the head keeps of all tokens.
        attends_by_position: whether the model's attention reads the positions of kept tokens.
        num_near: last tokens that every head keeps at every event, since the model's attention
            depends on distances up to that; 0: it does not. See `for_model`.
    """

    name: str
    scorer: Scorer
    allocator: Allocator
    selector: Selector
    protection: Protection
    merger: Merger | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = True
    min_window: int | None = None
    span_share: float | None = 1.0
    attends_by_position: bool = False
    num_near: int = 0

    @cached_property  # read at every step
    def needs(self) -> Needs:
        """What the parts read besides keys."""
        needs = self.scorer.needs.joined(self.selector.needs)
        if self.merger is not None:
            needs = needs.joined(self.merger.needs)
        return needs if self.min_window is None else replace(needs, min_window=self.min_window)

    def for_model(self, *, attends_by_position: bool, num_near: int) -> Pipeline:
        """Returns the policy for a model whose attention depends on distances in these ways."""
        bound = replace(self, attends_by_position=attends_by_position, num_near=num_near)
        if not num_near:
            return bound
        protection = replace(self.protection, num_recent=max(num_near, self.protection.num_recent))
        allocator = self.allocator.beside(protection)
        return replace(bound, protection=protection, allocator=allocator)

    @property
    def batches(self) -> bool:
        """Whether events of several requests, or layers of one, may run together.

        All parts have to allow it. A class says so for itself, and not for its subclasses.
        """
        parts = [self.scorer, self.allocator, self.selector, self.merger]
        return all(vars(type(part)).get("batches", False) for part in parts if part is not None)

    @property
    def any_order(self) -> bool:
        """Whether the same is kept in whatever order entries come, those first that always were.

        All parts have to declare it, as with `batches`. Mergers pair neighbours, and recent tokens
        are the last ones.
        """
        parts = [self.scorer, self.allocator, self.selector]
        keeps_recent = self.protection.num_recent or self.protection.recent_fraction
        declared = all(vars(type(part)).get("any_order", False) for part in parts)
        return declared and self.merger is None and not keeps_recent

    @property
    def corrects(self) -> bool:
        """Whether attention outputs are corrected after an event."""
        return self.merger is not None and self.merger.corrects

    @property
    def needs_biased_attention(self) -> bool:
        """Whether attention has to apply a bias, or return the log-sum-exp."""
        return self.corrects or self.weighs_entries or self.attends_by_position

    @property
    def weighs_entries(self) -> bool:
        """Whether kept entries have a bias on their attention logits."""
        return self.merger is not None and self.merger.weighs_entries

    @cached_property
    def token_state(self) -> tuple[str, ...]:
        """Fields of `EntryState` that are kept for every token, one fp32 number each."""
        needed = {
            "bias": self.weighs_entries,
            "positions": self.attends_by_position or (self.repeats and self.reads_positions),
            "accumulated": self.repeats and self.needs.accumulated,
            "running": self.repeats and self.needs.running,
        }
        return tuple(name for name in needed if needed[name])

    @property
    def keeps_spans_whole(self) -> bool:
        """Whether all tokens that a request protects are kept."""
        return self.span_share == 1.0

    @property
    def reads_positions(self) -> bool:
        """Whether events read the position of every entry."""
        return self.attends_by_position or self.needs.positions or not self.keeps_spans_whole

    def state_size(self, head_size: int) -> int:
        """Policy state of every head, in fp32 numbers."""
        if self.merger is None or not (self.repeats or self.corrects):
            return 0
        return self.merger.state_size(head_size)

    def state_pages(self, num_pages: int, shape: PageShape) -> int:
        """How many of a layer's `num_pages` pages a request's policy state takes on average."""
        numbers = self.state_size(shape.head_size) * shape.num_heads
        numbers += len(self.token_state) * num_pages * shape.block_size
        return math.ceil(4 * numbers / shape.page_bytes)

    def demand(self, shape: PageShape) -> PolicyDemand:
        """What it asks of the rule that plans its events."""
        return PolicyDemand(
            window_size=self.needs.window_size,
            min_window=self.needs.min_window,
            least_blocks=self.least_blocks(shape),
            blocks_on_top=self.blocks_on_top(shape),
            layer_dependent=self.layer_dependent,
            num_certain=self.protection.num_sinks + self.num_near if self.num_near else 0,
            state_share=4 * len(self.token_state) * shape.block_size / shape.page_bytes,
        )

    def least_blocks(self, shape: PageShape) -> int:
        """Fewest blocks that hold the state, and a page for every layer and head."""
        blocks = 1
        while True:
            pages = blocks * shape.num_heads
            if pages - self.state_pages(pages, shape) >= shape.num_heads:
                return blocks
            blocks += 1

    def blocks_on_top(self, shape: PageShape) -> int:
        """Blocks for the state of heads beside the budget; 0 where it counts in the budget."""
        if self.merger is None or not self.merger.state_on_top:
            return 0
        numbers = self.state_size(shape.head_size) * shape.num_heads
        return math.ceil(math.ceil(4 * numbers / shape.page_bytes) / shape.num_heads)

    @property
    def layer_dependent(self) -> bool:
        """Whether layers get different budgets."""
        return self.allocator.layer_dependent

    def check_budget(self, num_tokens: int) -> None:
        """Refuses a budget, in tokens per head, that protected tokens alone would exceed.

        Raises:
            ConfigError: says how many tokens are protected.
        """
        num_protected = self.protection.num_sinks + self.protection.num_recent
        if num_protected > num_tokens:
            raise ConfigError(
                f"a budget of {num_tokens} tokens leaves {self.name} nothing to choose, since it "
                f"always keeps {num_protected} (first tokens and recent ones); give a budget of "
                f"more than {num_protected}."
            )

    def check_room(self, num_tokens: int, shape: PageShape) -> None:
        """Refuses a budget whose policy state leaves no room for protected tokens, or for a block.

        Raises:
            ConfigError: says how many tokens the state takes, and which budget is enough.
        """
        block_size = shape.block_size
        num_blocks = math.ceil(num_tokens / block_size)
        enough, least = self._enough_blocks(shape), self._least_tokens(block_size)
        if enough > num_blocks:
            left = self._tokens_beside_state(num_blocks, shape)
            taken = num_blocks * block_size - left
            other = ", or state_room=on_top" if "state_room" in self.params else ""
            raise ConfigError(
                f"the state of {self.name} counts in the budget and takes as much as {taken:g} "
                f"tokens per head; expected at least {least} tokens besides it (a block, "
                f"or the first tokens and recent ones that are always kept), found "
                f"{max(0, left):g} of {num_tokens}; give at least "
                f"{enough * block_size}{other}."
            )

    def check_ceiling(self, num_tokens: int, shape: PageShape) -> None:
        """Refuses a ceiling below what is always kept and a block more.

        Raises:
            ConfigError: says which ceiling is enough.
        """
        least = self._enough_blocks(shape) + self.blocks_on_top(shape)
        enough = least = max(least, self.least_blocks(shape))
        while kept_below(enough) < least:
            enough += 1
        if enough > num_tokens // shape.block_size:
            raise ConfigError(
                f"a ceiling of {num_tokens} tokens: {self.name} always keeps "
                f"{least * shape.block_size} tokens per head, in blocks of {shape.block_size} "
                "(first tokens, recent ones and its state), and grows by a block until the next "
                f"event; give at least {enough * shape.block_size}."
            )

    def _least_tokens(self, block_size: int) -> int:
        """Counts the tokens per head that a budget holds at least, besides the policy state."""
        return max(block_size, self.protection.num_sinks + self.protection.num_recent)

    def _tokens_beside_state(self, num_blocks: int, shape: PageShape) -> float:
        """Counts the tokens per head for which a budget of blocks has room beside the state."""
        pages = (num_blocks + self.blocks_on_top(shape)) * shape.num_heads
        return (pages - self.state_pages(pages, shape)) * shape.block_size / shape.num_heads

    def _enough_blocks(self, shape: PageShape) -> int:
        """Counts the blocks of the smallest budget that has room for the tokens always kept."""
        enough = 1
        while self._tokens_beside_state(enough, shape) < self._least_tokens(shape.block_size):
            enough += 1
        return enough

    def bind(self, *heads: int, **named: int) -> Pipeline:
        """The pipeline for one model and one rank's heads, given as `ModelHeads` takes them.

        A policy that scores is bound also where a modifier allocates in its place.

        Raises:
            ConfigError: the profile is of another model.
        """
        model = ModelHeads(*heads, **named)
        scorer: Any = self.scorer
        merger: Any = self.merger
        if isinstance(scorer, Allocator):
            scorer = scorer.bind(model)
        if isinstance(merger, Allocator):
            merger = merger.bind(model)
        allocator = self.allocator.bind(model)
        return replace(self, scorer=scorer, allocator=allocator, merger=merger)
