"""What a policy sees and what its stages return.

One request and one layer at a time. H = KV heads of this rank, G = query heads per KV head
(query head h*G + g reads KV head h), n = padded number of entries, D = head size,
w = observed queries. Entries are in position order; a head's valid entries come first.

    |<------------- n_h entries of full blocks ------------->|<-- t tail entries -->|
     may be kept or evicted                                    always kept
                                    |<------ the last w entries: their queries ---->|
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from vllm_kvcompress.kernels.common.tiles import tile_bytes, valid_entries

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
    from vllm_kvcompress.policies.rotary import Rotary

T = TypeVar("T")


class Deferred:
    """A field that holds a tensor, or a function that makes it and is called by the first reader.

    Args:
        name: the field's.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, view: Any, owner: type | None = None) -> Tensor:
        held = view.__dict__[self._name]
        return held() if callable(held) else held

    def __set__(self, view: Any, held: Tensor | Callable[[], Tensor]) -> None:
        view.__dict__[self._name] = functools.cache(held) if callable(held) else held


def deferring(*names: str) -> Callable[[type[T]], type[T]]:
    """Lets fields of a dataclass be given as functions."""

    def decorate(dataclass_: type[T]) -> type[T]:
        for name in names:
            setattr(dataclass_, name, Deferred(name))
        return dataclass_

    return decorate


@dataclass(frozen=True)
class SourcePages:
    """The pages that a layer's entries lie in, for kernels that read pages.

    Attributes:
        body: the entries of full blocks; its capacity is n.
        whole: these, and the tail's behind them.
        num_tail: t.
    """

    body: PagedEntries
    whole: PagedEntries
    num_tail: int


@deferring("keys", "values", "tail_keys", "tail_values")
@dataclass(frozen=True)
class LayerView:
    """One request's cache in one layer at a compression event.

    Where kernels read pages, keys and values are gathered from these when somebody asks for them.

    Attributes:
        keys: [H, n, D] cached (rotated) keys of the full blocks, padded on the right.
        values: [H, n, D], likewise.
        lengths: [H] int64, resident tokens per head among `keys`; multiples of `block_size`.
        tail_keys: [H, t, D] keys of the partial last block; these entries are always kept.
        tail_values: [H, t, D], likewise.
        queries: [w, H*G, D] rotated queries of the last w tokens, oldest first; w may be
            smaller than the policy asked for (a short prompt or chunk), and 0.
        scale: softmax scale of the model's attention.
        layer: which layer this is, among the compressed ones.
        num_layers: compressed layers of the model.
        block_size: tokens of a page.
        output_weight: [H, D, G, M] o_proj, [h, :, g] of query head h*G + g (None unless needed).
        output_gram: [H*G, D, D] fp32, W W^T per query head (None unless needed).
        state: [H, s] fp32, what the policy's merger left at the former event (None: no former
            event, or no policy state).
        bias: [H, n] fp32, added to the attention logits of each entry: the logarithm of how many
            tokens it stands for (None: one each). The tail's entries stand for one each.
        positions: [H, n] int64 logical position that each key is rotated to (None unless needed).
        rotary: how keys are rotated (None unless needed).
        accumulated: [H, n] fp32 attention that each entry has received from the observed queries
            of all events so far, this one's included once a policy reads it (None unless needed).
        pages: where the entries lie (None unless kernels read pages).
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    queries: Tensor
    scale: float
    layer: int
    num_layers: int
    block_size: int
    output_weight: Tensor | None = None
    output_gram: Tensor | None = None
    state: Tensor | None = None
    bias: Tensor | None = None
    positions: Tensor | None = None
    rotary: Rotary | None = None
    accumulated: Tensor | None = None
    pages: SourcePages | None = None

    @property
    def num_heads(self) -> int:
        """H."""
        return int(self.lengths.shape[0])

    @property
    def num_entries(self) -> int:
        """n."""
        return int(self.keys.shape[1]) if self.pages is None else self.pages.body.capacity

    @property
    def num_tail(self) -> int:
        """t."""
        return int(self.tail_keys.shape[1]) if self.pages is None else self.pages.num_tail

    @property
    def head_size(self) -> int:
        """D."""
        return int(self.keys.shape[2]) if self.pages is None else self.pages.body.head_size

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        device: torch.device = self.lengths.device
        return device

    @functools.cached_property
    def valid(self) -> Tensor:
        """[H, n] bool: entries below each head's length."""
        return valid_entries(self.lengths, self.num_entries)

    def with_accumulated(self, accumulated: Tensor) -> LayerView:
        """The same view with other sums of attention; what is not gathered yet stays so."""
        changed = copy.copy(self)
        object.__setattr__(changed, "accumulated", accumulated)
        return changed

    def head_slices(self) -> list[slice]:
        """Heads that a policy may go through at once, with temporaries of [heads, n, D] in fp32.

        On the CPU one, so that temporaries stay in its cache; elsewhere as many as fit a tile.
        """
        at_once = 1
        if self.device.type != "cpu":
            entry_bytes = 4 * self.head_size
            at_once = max(1, tile_bytes(self.device) // max(1, self.num_entries * entry_bytes))
        return [slice(first, first + at_once) for first in range(0, self.num_heads, at_once)]

    def heads(self, mine: slice) -> LayerView:
        """The entries of some KV heads, without queries and W_O."""
        return replace(
            self,
            keys=lambda: self.keys[mine],
            values=lambda: self.values[mine],
            lengths=self.lengths[mine],
            tail_keys=lambda: self.tail_keys[mine],
            tail_values=lambda: self.tail_values[mine],
            queries=self.queries[:, :0],
            output_weight=None,
            output_gram=None,
            state=None if self.state is None else self.state[mine],
            bias=None if self.bias is None else self.bias[mine],
            positions=None if self.positions is None else self.positions[mine],
            accumulated=None if self.accumulated is None else self.accumulated[mine],
            pages=None,
        )


@dataclass(frozen=True)
class Needs:
    """What the engine has to hand to a pipeline besides keys and values.

    Attributes:
        window_size: how many of the last queries the scorer observes (0: none).
        output_weight: the exact o_proj weight, by head.
        output_gram: the Gram matrix of the o_proj weight, per query head.
        values: the values; implied by the two above.
        plain_logits: attention logits without soft-capping, which the formulas leave out.
        positions: the position of every key, and how keys are rotated.
        accumulated: the attention that entries have received, event after event.
    """

    window_size: int = 0
    output_weight: bool = False
    output_gram: bool = False
    values: bool = False
    plain_logits: bool = False
    positions: bool = False
    accumulated: bool = False

    def joined(self, other: Needs) -> Needs:
        """What either of two parts needs."""
        ours, theirs = asdict(self), asdict(other)
        return Needs(**{name: max(ours[name], theirs[name]) for name in ours})

    @property
    def any_values(self) -> bool:
        """Whether values have to be read."""
        return self.values or self.output_weight or self.output_gram


@dataclass(frozen=True)
class Selection:
    """What one layer keeps.

    Attributes:
        page_counts: [H] int64, pages per head; the sum is the layer's page budget.
        kept_indices: [sum(page_counts) * block_size] int64 indices into a head's entries,
            head after head, in position order within a head.
        merged: what a merger made of the entries.
    """

    page_counts: Tensor
    kept_indices: Tensor
    merged: Merged = field(default_factory=lambda: Merged())

    def heads(self, block_size: int) -> Tensor:
        """[kept entries] int64: whose each kept entry is."""
        num_pages = self.kept_indices.shape[0] // block_size
        heads = torch.repeat_interleave(self.page_counts, output_size=num_pages)
        return heads.repeat_interleave(block_size)


@dataclass(frozen=True)
class Merged:
    """What becomes of evicted entries: they change kept ones, or a state, or nothing.

    Attributes:
        keys, values: [H, n, D] instead of the view's, or None where these stay as they are.
        state: [H, s] fp32, kept for the next event in the request's own blocks.
        bias: [H, n] fp32 instead of the view's, likewise kept; only from mergers that
            weigh entries.
        positions: [H, n] int64 instead of the view's, likewise kept; only from mergers that
            need positions.
        accumulated: [H, n] fp32 instead of the view's, likewise kept; None: stays as it is.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    state: Tensor | None = None
    bias: Tensor | None = None
    positions: Tensor | None = None
    accumulated: Tensor | None = None


class Merger:
    """Puts something in the place of what is evicted."""

    @property
    def needs(self) -> Needs:
        """What the engine has to hand over besides keys."""
        return Needs()

    @property
    def corrects(self) -> bool:
        """Whether later attention outputs are corrected from the policy state (MomentKV)."""
        return False

    @property
    def weighs_entries(self) -> bool:
        """Whether kept entries get a bias on their logits."""
        return False

    def state_size(self, head_size: int) -> int:
        """fp32 numbers per KV head that stay from event to event."""
        return 0

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """What becomes of the valid entries that are not `kept` ([H, n] bool)."""
        raise NotImplementedError


class Scorer(Protocol):
    """Importance of each token; higher is kept."""

    @property
    def needs(self) -> Needs: ...

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 scores; padding entries may hold anything."""
        ...


@dataclass(frozen=True)
class ModelHeads:
    """What a policy is told of a model, and which heads are this rank's.

    Attributes:
        num_layers: compressed layers.
        num_kv_heads: KV heads of this rank.
        num_query_heads: query heads of this rank.
        block_size: tokens of a page.
        tp_rank: which part of the heads this rank has.
        tp_size: tensor-parallel size.
    """

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    block_size: int
    tp_rank: int = 0
    tp_size: int = 1
