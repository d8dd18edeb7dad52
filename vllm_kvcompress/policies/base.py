"""What a policy sees of a layer's cache, and what its stages return.

H = KV heads of this rank, G = query heads per KV head (query head h*G + g reads KV head h),
n = padded number of entries, D = head size, w = observed queries. Entries are in position order,
unless the policy allows another (`Pipeline.any_order`); a head's valid entries come first.

    |<------------- n_h entries of full blocks ------------->|<-- t tail entries -->|
     may be kept or evicted                                    always kept
                                    |<------ the last w entries: their queries ---->|
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm_kvcompress.errors import InvariantError

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_kvcompress.kernels.alibi import Alibi
    from vllm_kvcompress.kernels.common.kv_view import KVView
    from vllm_kvcompress.kernels.common.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class EntryState:
    """Policy state of entries, which survives from event to event; None where it is not needed.

    Attributes:
        bias: [H, n] fp32, added to the attention logits of each entry: the logarithm of how many
            tokens it stands for. The tail's entries stand for one token each.
        positions: [H, n] int64 logical position that each key is rotated to.
        accumulated: [H, n] fp32 attention that each entry has received from the observed queries
            of all events, this one included.
        running: [H, n] fp32 key weights that a merger adds up over events.
    """

    bias: Tensor | None = None
    positions: Tensor | None = None
    accumulated: Tensor | None = None
    running: Tensor | None = None


@dataclass(frozen=True)
class LayerView:
    """Cache of one request in one layer at a compression event, or of several as more heads.

    Attributes:
        kv: keys and values; full blocks may be evicted, the tail's tokens are always kept.
        queries: [w, H*G, D] rotated queries of the last w tokens, oldest first; w may be
            smaller than the policy asked for (a short prompt or chunk), and 0.
        scale: softmax scale of the model's attention.
        layers: index of the layer among the compressed ones; several layers only for policies
            that set `batches`.
        block_size: tokens of a page.
        num_requests: R requests whose heads follow one another. In several layers a request counts
            once for each, since every layer has its own budget: first all requests of one layer.
        ends: logical tokens that each of the R requests has read.
        output_weight: [H, D, G, M] o_proj, [h, :, g] of query head h*G + g (None unless needed).
        output_root: [H*G, D, D] L with L L^T = W W^T, per query head (None unless needed).
        rotary: how keys are rotated (None unless needed).
        sinks: [H, G] logits of the model's attention sinks, which take attention without being
            tokens (None if it has none).
        alibi: the model's biases of attention by distance (None if it has none).
        state: [H, s] fp32 policy state that the merger left at the last event (None at a first
            event).
        entries: policy state of entries.
        protected: [H, n] bool, true for entries that every head keeps since the request asks for
            it; None: it asks for none. Those that earlier events kept come first.
        shared_spans: [R, 1 + spans, 2] int64 logical tokens, start and end: all that the event
            reads, then the spans of which every head keeps a part; None: there are none.
    """

    kv: KVView
    queries: Tensor
    scale: float
    layers: range
    block_size: int
    num_requests: int = 1
    ends: tuple[int, ...] = ()
    output_weight: Tensor | None = None
    output_root: Tensor | None = None
    rotary: Rotary | None = None
    sinks: Tensor | None = None
    alibi: Alibi | None = None
    state: Tensor | None = None
    entries: EntryState = field(default_factory=EntryState)
    protected: Tensor | None = None
    shared_spans: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """[H] int64 resident tokens in full blocks; multiples of `block_size`."""
        return self.kv.lengths

    @property
    def valid(self) -> Tensor:
        """[H, n] bool, true below each head's length."""
        return self.kv.valid

    @property
    def layer(self) -> int:
        """Index of the layer, where the view has one.

        Raises:
            InvariantError: the view has several layers.
        """
        if len(self.layers) > 1:
            raise InvariantError(
                f"expected one layer, found layers {self.layers.start} to {self.layers.stop - 1} "
                "together; go through view.layers, or take `batches = True` out of the policy."
            )
        return self.layers.start

    @property
    def num_heads(self) -> int:
        """Number of KV heads, H."""
        return self.kv.num_heads

    @property
    def heads_per_request(self) -> int:
        """Number of KV heads of one request in one layer."""
        return self.num_heads // self.num_requests

    def by_request(self, of_heads: Tensor) -> Tensor:
        """Splits heads by request: [H, ...] -> [R, heads per request, ...] (a view)."""
        return of_heads.unflatten(0, (self.num_requests, -1))

    def for_requests(self, of_layers: Tensor) -> Tensor:
        """Repeats each layer's rows for each of its requests: [layers, ...] -> [R, ...]."""
        repeats = self.num_requests // len(self.layers)
        return of_layers if repeats == 1 else of_layers.repeat_interleave(repeats, dim=0)

    def for_heads(self, of_requests: Tensor) -> Tensor:
        """Repeats each request's number for each of its heads: [R] -> [H]."""
        return of_requests[:, None].expand(-1, self.heads_per_request).flatten()

    @property
    def num_entries(self) -> int:
        """Padded number of entries, n."""
        return self.kv.capacity

    @property
    def num_tail(self) -> int:
        """Number of tokens in the longest partial block, t."""
        return self.kv.num_tail

    @property
    def device(self) -> torch.device:
        """Device that holds the entries."""
        return self.kv.device


@dataclass(frozen=True)
class Needs:
    """What a pipeline reads besides keys, and the engine therefore has to provide.

    Attributes:
        window_size: how many of the last queries the scorer observes (0: none).
        min_window: how many of them are enough behind a prefix-cache hit, which leaves no queries
            of the tokens before it; None: all.
        output_weight: the o_proj weight, by head.
        output_root: the root L of W W^T of the o_proj weight, per query head.
        values: the values; implied by the two above.
        plain_logits: attention without capped logits or sinks, as the paper's formulas assume.
        positions: the position of every key, and how keys are rotated.
        rotary: how keys and queries are rotated.
        accumulated: the attention that entries have received over all events.
        stride: every stride-th observed query is accumulated, counted back from the last one.
        running: sums per entry that a merger updates at every event.
    """

    window_size: int = 0
    min_window: int | None = None
    output_weight: bool = False
    output_root: bool = False
    values: bool = False
    plain_logits: bool = False
    positions: bool = False
    rotary: bool = False
    accumulated: bool = False
    stride: int = 1
    running: bool = False

    def joined(self, other: Needs) -> Needs:
        """Combines the needs of two parts."""
        ours, theirs = asdict(self), asdict(other)
        del ours["min_window"]
        joined = Needs(**{name: max(ours[name], theirs[name]) for name in ours})
        needed = max(self.needed_queries, other.needed_queries)
        return joined if needed == joined.window_size else replace(joined, min_window=needed)

    @property
    def needed_queries(self) -> int:
        """Fewest last queries that a prefix-cache hit has to leave."""
        fewest = self.window_size if self.min_window is None else self.min_window
        return min(fewest, self.window_size)


@dataclass(frozen=True)
class Merged(EntryState):
    """Result of merging evicted entries: changed kept ones, policy state, or nothing.

    Fields of `EntryState` replace those of the view at the next event: `bias` only from mergers
    that weigh entries, `positions` and `running` only from those whose `needs` ask for them.

    Attributes:
        keys, values: [H, n, D] instead of the view's; None: unchanged.
        state: [H, s] fp32 policy state of heads for the next event.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    state: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """Entries that one layer keeps.

    Attributes:
        page_counts: [H] int64 pages per head; their sum is the layer's page budget.
        kept_indices: [sum(page_counts) * block_size] int64 indices into a head's entries,
            head after head, in the order of their places afterwards.
        merged: what a merger made of the evicted entries.
    """

    page_counts: Tensor
    kept_indices: Tensor
    merged: Merged = field(default_factory=Merged)

    def heads(self, block_size: int) -> Tensor:
        """[kept entries] int64 head that each kept entry belongs to."""
        num_pages = self.kept_indices.shape[0] // block_size
        heads = torch.repeat_interleave(self.page_counts, output_size=num_pages)
        return heads.repeat_interleave(block_size)


class Merger:
    """Merges evicted entries into kept ones, or into policy state."""

    @property
    def needs(self) -> Needs:
        """What the merger reads besides keys."""
        return Needs()

    @property
    def corrects(self) -> bool:
        """Whether later attention outputs are corrected from the policy state (MomentKV)."""
        return False

    @property
    def weighs_entries(self) -> bool:
        """Whether kept entries get a bias on their attention logits."""
        return False

    @property
    def state_on_top(self) -> bool:
        """Whether the policy state of heads is allocated beside the budget, not within it."""
        return False

    def state_size(self, head_size: int) -> int:
        """Number of fp32 numbers per KV head that are kept from event to event."""
        return 0

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Merges the valid entries that are not `kept` ([H, n] bool)."""
        raise NotImplementedError


class Scorer(Protocol):
    """Importance of each token; higher is kept."""

    @property
    def needs(self) -> Needs: ...

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 scores; padding entries may hold anything."""
        ...


class PageShape(NamedTuple):
    """Pages of one layer on one rank.

    Attributes:
        num_heads: KV heads.
        head_size: numbers of a key.
        block_size: tokens of a page.
        page_bytes: bytes of a page.
    """

    num_heads: int
    head_size: int
    block_size: int
    page_bytes: int


@dataclass(frozen=True)
class ModelHeads:
    """Layers and heads of a model, and which of them this rank has.

    Attributes:
        num_layers: compressed layers of this rank.
        num_kv_heads: KV heads of this rank.
        num_query_heads: query heads of this rank.
        block_size: tokens of a page.
        tp_rank: index of this rank's part of the heads.
        tp_size: tensor-parallel size.
        first_layer: compressed layers of earlier pipeline stages.
        later_layers: compressed layers of later pipeline stages.
    """

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    block_size: int
    tp_rank: int = 0
    tp_size: int = 1
    first_layer: int = 0
    later_layers: int = 0

    @property
    def num_layers_of_model(self) -> int:
        """Compressed layers of all pipeline stages."""
        return self.first_layer + self.num_layers + self.later_layers

    @property
    def own_layers(self) -> slice:
        """This rank's layers, in a list of those of the model."""
        return slice(self.first_layer, self.first_layer + self.num_layers)
