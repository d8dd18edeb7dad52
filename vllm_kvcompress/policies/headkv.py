"""Not All Heads Matter: A Head-Level KV Cache Compression Method, arXiv 2410.19258.

The authors' file is JSON, `{"layer-queryhead": [scores, ...], ...}`; importance is their mean.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor

from vllm_kvcompress.config.auto import MEASURING_PART
from vllm_kvcompress.policies import Allocator, Modifier, Pipeline, Stages, parameter
from vllm_kvcompress.policies.base import LayerView, ModelHeads
from vllm_kvcompress.policies.keyspans import KeySpans
from vllm_kvcompress.policies.parts import profiles
from vllm_kvcompress.policies.parts.allocation import divide, spread, spread_within
from vllm_kvcompress.policies.parts.mass import ENOUGH_QUERIES
from vllm_kvcompress.policies.parts.profiles import Table
from vllm_kvcompress.policies.snapkv import SnapKV
from vllm_kvcompress.policies.spans import HighestRank

Scores = list[list[list[float]]]  # by layer, query head and prompt
PEAK = 10.0  # of the mean, for the first head with `keyspans`: a tenth is then its whole prompt
MAX_POWER, POWER_STEP = 2.0, 0.25  # of importance


@dataclass(frozen=True)
class MeasuredHeads(Allocator):
    """Divides a budget by measured heads, from a file or from the engine when it starts.

    Attributes:
        importance: measured, by layer and query head; empty: not yet, and all heads get the same.
    """

    profile: ClassVar[str | None] = MEASURING_PART

    importance: Table = ()

    @property
    def layer_dependent(self) -> bool:
        """Whether layers get different budgets."""
        return bool(self.importance)

    def with_profile(self, path: Path) -> Self:
        """The part with the heads of a file; raises like `read_importance`."""
        return self.with_importance(read_importance(path))

    def with_importance(self, importance: Table) -> Self:
        """The part with measured heads."""
        return replace(self, importance=importance)


@dataclass(frozen=True)
class ByImportance(MeasuredHeads, Modifier):
    """Budgets per head from a measured table, on top of another policy's choice.

    A head's share is `even_share` of the mean and the rest by importance to the power of
    `temperature`; what a full head cannot take goes to the model's other heads, in proportion.
    Scores are not compared between heads, so any will do.

    Attributes:
        peak: the power is raised from `temperature` on, to 2 at most, until one KV head of the
            model gets this many times the mean budget: a head must hold the whole prompt to find
            what nobody has asked for yet. 0: the power is `temperature`.
        importance: measured, by layer and query head; once bound to a model the shares of the
            rank's KV heads, whose mean is 1.
    """

    name = "headkv"
    batches = True
    stages = Stages(allocate="by the heads' importance in the profile, over all layers")
    goes_on = ("attention", "spans", "keyspans", "h2o", "leverage", "expected", "keydiff")
    refuses = {"adakv": "headkv and {} both decide how much each head keeps"}  # noqa: RUF012

    even_share: float = parameter(0.1, "part of the budget shared out evenly", 0.0, 1.0)
    temperature: float = parameter(1.0, "importance is raised to this power", 0.0)
    peak: float = 0.0

    def modify(self, base: Pipeline) -> Pipeline:
        """Replaces the allocator; policies of three ranks then need fewer queries."""
        ranked = isinstance(base.scorer, HighestRank)
        peak = PEAK if isinstance(base.scorer, KeySpans) else 0.0
        min_window = ENOUGH_QUERIES if ranked else base.min_window
        return replace(base, allocator=replace(self, peak=peak), min_window=min_window)

    def bind(self, model: ModelHeads) -> Self:
        """Turns importance into shares of this rank's KV heads, whose mean is 1."""
        table = importance_of_rank(self.importance, model, self._power(model))
        return replace(self, importance=self._shares(table))

    def _shares(self, table: Table) -> Table:
        """Shares of heads whose importance adds up to 1, as multiples of the mean."""
        rest = (1 - self.even_share) * len(table) * len(table[0])
        return tuple(tuple(self.even_share + rest * value for value in row) for row in table)

    def _power(self, model: ModelHeads) -> float:
        """Power of importance that `peak` takes, by the whole model's heads on every rank."""
        kv_heads, query_heads = (
            each * model.tp_size for each in (model.num_kv_heads, model.num_query_heads)
        )
        whole = ModelHeads(model.num_layers_of_model, kv_heads, query_heads, model.block_size)
        power = self.temperature
        while power < MAX_POWER:
            shares = self._shares(importance_of_rank(self.importance, whole, power))
            if max(map(max, shares)) >= self.peak:
                break
            power = min(power + POWER_STEP, MAX_POWER)
        return power

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: the sum of its heads', each at most everything."""
        full = num_logical_blocks or max(capacity) // num_heads
        total = num_blocks * num_heads * len(capacity)
        flat = [share for row in self.importance for share in row]
        pages = spread(flat, total, [full] * len(flat), [1] * len(flat))
        by_layer = [sum(pages[i : i + num_heads]) for i in range(0, len(pages), num_heads)]
        return spread_within(by_layer, total, capacity)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        return divide(view, profiles.of_layers(self.importance, view).flatten(), total, floor)


@dataclass(frozen=True)
class HeadKV(MeasuredHeads, SnapKV):
    """SnapKV with budgets per head from a measured table.

    With c the mean budget beyond the window, every head gets the window, c - c / beta, and a share
    by its importance of the pool of all c / beta. What a full head cannot take stays in its layer.

    Attributes:
        importance: measured, by layer and query head; once bound to a model by layer and the
            rank's KV heads, in sum 1.
        block_size: tokens of a page, once bound.
    """

    name = "headkv"
    batches = True
    stages = SnapKV.stages._replace(allocate="by the heads' importance in the profile")
    decides = ("how much each head keeps", "how much each layer keeps")

    beta: float = parameter(1.01, "1/beta of every budget is pooled", 1.0)
    temperature: float = parameter(1.0, "scores are raised to this power", 0.0)
    block_size: int = 0

    def bind(self, model: ModelHeads) -> Self:
        """Reduces importance to this rank's KV heads.

        Ranks have equal budgets, each for its heads, so importance is relative to the rank's sum.
        """
        table = importance_of_rank(self.importance, model, self.temperature)
        return replace(self, importance=table, block_size=model.block_size)

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: the sum of its heads'."""
        window = min(self.window_size / self.block_size, num_blocks)
        mean, layers = num_blocks - window, range(len(capacity))
        shares = [sum(window + mean * part for part in self._parts(layer)) for layer in layers]
        total = num_blocks * num_heads * len(capacity)
        return spread(shares, total, capacity, [num_heads] * len(capacity))

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        parts = profiles.of_layers({layer: self._parts(layer) for layer in view.layers}, view)
        wanted, num_heads = total[:, None].double(), parts.shape[1]
        window = (wanted / num_heads).clamp_max(self.window_size / self.block_size)
        # The mean over all layers with which this layer has its total.
        mean = (wanted - window * num_heads) / parts.sum(dim=1, keepdim=True)
        return divide(view, (window + mean * parts).flatten(), total, floor)

    def _parts(self, layer: int) -> tuple[float, ...]:
        """Budget of each head beyond the window, as a multiple of the mean."""
        num_all = len(self.importance) * len(self.importance[0])
        even = 1 - 1 / self.beta
        return tuple(even + score * num_all / self.beta for score in self.importance[layer])


def importance_of_rank(importance: Table, model: ModelHeads, temperature: float) -> Table:
    """Mean importance of each KV head's query heads, by layer and head of this rank; in sum 1."""
    if not importance:
        heads = (1.0,) * (model.num_query_heads * model.tp_size)
        importance = (heads,) * model.num_layers_of_model
    rows = profiles.rows_of_rank(importance, model, model.num_query_heads, "query")
    group = model.num_query_heads // model.num_kv_heads
    powered = [[max(0.0, score) ** temperature for score in row] for row in rows]
    means = [
        [sum(row[h * group : (h + 1) * group]) / group for h in range(model.num_kv_heads)]
        for row in powered
    ]
    total = sum(map(sum, means))
    if total <= 0:
        means, total = [[1.0] * model.num_kv_heads for _ in rows], len(rows) * len(means[0])
    return tuple(tuple(value / total for value in row) for row in means)


def mean_importance(scores: Scores) -> Table:
    """Importance of heads from their scores in prompts."""
    return tuple(tuple(sum(values) / len(values) for values in heads) for heads in scores)


def headkv_text(scores: Scores) -> str:
    """The text of a file that `read_importance` reads."""
    rows = {
        f"{layer}-{head}": values
        for layer, heads in enumerate(scores)
        for head, values in enumerate(heads)
    }
    return json.dumps(rows, indent=1) + "\n"


def read_importance(path: Path) -> Table:
    """Reads importance by layer and query head.

    Raises:
        ConfigError: there is no such file, or it has another format, lacks heads or has NaN in it.
    """
    means: dict[tuple[int, int], float] = {}
    for key, scores in profiles.read_json(path).items():
        try:
            layer, head = (int(part) for part in key.split("-"))
            values = [float(score) for score in scores]
            means[layer, head] = sum(values) / len(values)
        except (ValueError, TypeError, ZeroDivisionError):
            reason = f'expected "layer-head": [scores], found {key!r}: {scores!r}'
            raise profiles.refusal(path, reason) from None
    num_layers = 1 + max((layer for layer, _ in means), default=-1)
    num_heads = 1 + max((head for _, head in means), default=-1)
    if len(means) != num_layers * num_heads or not means:
        shape = f"{len(means)} of {num_layers} x {num_heads}"
        raise profiles.refusal(path, f"expected every head of every layer, found {shape}")
    table = tuple(tuple(means[la, h] for h in range(num_heads)) for la in range(num_layers))
    profiles.check_finite(path, table)
    return table
