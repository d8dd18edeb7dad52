"""DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
arXiv 2410.10819.

The authors' files: `full_attention_heads.tsv`, one line of gates per layer and a column per KV
head, and beside it `config.json` with `sink_size` and `recent_size`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from vllm_kvcompress.policies import LayerView, ModelHeads, Policy, Protection, Stages
from vllm_kvcompress.policies.parts import profiles
from vllm_kvcompress.policies.parts.allocation import pages_held, spread_within
from vllm_kvcompress.policies.parts.profiles import Table
from vllm_kvcompress.policies.streamingllm import positions_as_scores


@dataclass(frozen=True)
class DuoAttention(Policy):
    """Keeps everything in retrieval heads, and sinks and recent tokens in the others.

    The budget says how many heads can keep everything; those with the highest gates do, and the
    next one keeps what is left.

    Attributes:
        gates: by layer and KV head, from 0 to 1; once bound to a model those of the rank's heads.
        num_sinks: first tokens that streaming heads keep.
        num_recent: last tokens that streaming heads keep.
        block_size: tokens of a page, once bound.
    """

    name = "duoattention"
    batches = True
    stages = Stages(
        score="position",
        protect="the pattern's first sink_size tokens",
        allocate="everything for the heads with the highest gates, as far as the budget goes",
        select="most recent",
    )
    decides = ("how much each head keeps", "how much each layer keeps")
    profile = "duoattention"
    layer_dependent = True

    gates: Table = ()
    num_sinks: int = 128
    num_recent: int = 256
    block_size: int = 0

    def with_profile(self, path: Path) -> Self:
        gates, sinks, recent = read_pattern(path)
        return replace(self, gates=gates, num_sinks=sinks, num_recent=recent)

    def bind(self, model: ModelHeads) -> Self:
        gates = profiles.rows_of_rank(self.gates, model, model.num_kv_heads, "KV")
        return replace(self, gates=gates, block_size=model.block_size)

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.num_sinks)

    def score(self, view: LayerView) -> Tensor:
        return positions_as_scores(view)

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: everything for its retrieval heads, a few for the others.

        A head that keeps everything has `num_logical_blocks` pages.
        """
        full = num_logical_blocks or max(capacity) // num_heads
        few = min(self._few, num_blocks)
        pages = [few * num_heads] * len(capacity)
        total = num_blocks * num_heads * len(capacity)
        left = total - sum(pages)
        by_gate = sorted((-gate, layer) for layer, row in enumerate(self.gates) for gate in row)
        for _, layer in by_gate:
            more = min(left, max(0, full - few))
            pages[layer] += more
            left -= more
        return spread_within(pages, total, capacity)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        """[H] int64 pages of each head: a few for all, then by gate up to everything."""
        held = pages_held(view)
        even = total // held.shape[1]
        few = torch.maximum(even.clamp_max(self._few), floor.minimum(even))
        fewest = few[:, None].minimum(held)
        order = profiles.of_layers(self.gates, view).argsort(dim=1, descending=True, stable=True)
        room = (held - fewest).gather(1, order)
        before = room.cumsum(1) - room
        left = total[:, None] - fewest.sum(dim=1, keepdim=True)
        more = (left - before).clamp_min(0).minimum(room)
        return fewest.scatter_add(1, order, more).flatten()

    @property
    def _few(self) -> int:
        """Pages of a streaming head."""
        return math.ceil((self.num_sinks + self.num_recent) / self.block_size)


def read_pattern(path: Path) -> tuple[Table, int, int]:
    """Reads gates, sinks and recent tokens from the TSV file or the directory that holds it.

    Raises:
        ConfigError: there is no such file, or it has another format, or lines of different lengths.
    """
    table = path / "full_attention_heads.tsv" if path.is_dir() else path
    lines = [line.split() for line in profiles.read_text(table).splitlines() if line.strip()]
    try:
        gates = tuple(tuple(float(gate) for gate in line) for line in lines)
    except ValueError as error:
        reason = f"expected gates as numbers, one line per layer ({error})"
        raise profiles.refusal(table, reason) from None
    if not gates or len({len(row) for row in gates}) != 1:
        raise profiles.refusal(table, "expected lines with one gate per KV head each")
    profiles.check_finite(table, gates)
    config = table.parent / "config.json"
    sizes = profiles.read_json(config)
    try:
        sinks, recent = int(sizes["sink_size"]), int(sizes["recent_size"])
        if min(sinks, recent) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        reason = f"expected sink_size and recent_size, in tokens, found {sizes}"
        raise profiles.refusal(config, reason) from None
    return tuple(tuple(min(1.0, max(0.0, gate)) for gate in row) for row in gates), sinks, recent
