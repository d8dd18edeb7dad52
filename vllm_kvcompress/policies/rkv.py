"""R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv 2505.24133.

The authors' code (github.com/Zefan-Cai/R-KV, d15c976) gave the paper's figures and is the default.
It differs from the paper: a token's link to the most recent token that is like it is taken from
the redundancy of that later token (the paper: of the token itself, Eq. 6), or, where none is like
it, its link to the first token is; the window's keys count in the redundancy as well; attention is
averaged before it is pooled (the paper pools every query, over i - W to i + W - 1); lambda is 0.07
in its script (0.1 in the paper, and here); a prompt that exceeds the budget is compressed at once;
and one sequence at a time is served. The paper leaves open how many recent tokens lose their link
(beta), and the threshold: 1 and 0.5 in the code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.tiles import tile_bytes
from vllm_kvcompress.kernels.pooling import max_or_mean_pool, max_within
from vllm_kvcompress.kernels.window_mass import HIDDEN, WindowColumns, by_head
from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.parts.mass import check_kernel_size

CODE = "code"


@dataclass(frozen=True)
class RKV(Policy):
    """Keeps what the last queries attend to, less what other keys resemble.

    mix_lambda * I - (1 - mix_lambda) * R. The importance I is the window's attention to tokens
    before it: logits' maximum over a KV head's group, softmax, mean over queries, max-pooled. The
    redundancy R is the softmax of each key's mean cosine to all others, without the links of
    tokens to the most recent one that is like them (cosine above threshold).

    Every pair of resident keys is multiplied: D * n^2 products per head and event for n tokens, in
    tiles, so that memory grows with n. Means need no pairs, only the search for recent tokens does.
    """

    name = "rkv"
    batches = True
    stages = Stages(
        score="mix_lambda times the attention of the last window_size queries, max-pooled, less "
        "1 - mix_lambda times the key's redundancy",
        protect="the last window_size tokens",
        allocate="the same for every layer and head",
        select="highest score",
    )

    window_size: int = parameter(8, "last queries observed, and kept", minimum=1)
    kernel_size: int = parameter(7, "width of the pooling over neighbours; odd", minimum=1)
    mix_lambda: float = parameter(0.1, "weight of the importance", 0.0, 1.0)
    threshold: float = parameter(0.5, "cosine above which keys are alike", 0.0, 1.0)
    variant: str = parameter(
        CODE, "as in the authors' code, or as in their paper", choices=(CODE, "paper")
    )

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        return Protection(num_recent=self.window_size)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 between mix_lambda - 1 and mix_lambda."""
        window = len(view.queries)
        columns = WindowColumns.of(view.kv, range(window - 1, -1, -1) or (0,))
        behind = torch.arange(columns.num_columns - 1, -1, -1, device=view.device)
        total = (view.lengths + view.kv.tails)[:, None]
        tokens = behind < total
        before = tokens & (behind >= window)  # left of the window
        compared = tokens if self.variant == CODE else before
        first = (columns.num_columns - total).clamp_max(columns.num_columns - 1)
        queries = by_head(view.queries, view.num_heads) * view.scale
        scores = torch.empty(view.num_heads, view.num_entries, device=view.device)
        for some in view.kv.head_slices():
            keys = columns.seen(some, view.kv.keys()[some], view.kv.tail_keys()[some])
            score = (self.mix_lambda - 1) * self._redundancy(keys, compared[some], first[some])
            if window:
                importance = self._importance(queries[some], keys, before[some], window)
                score += self.mix_lambda * importance
            scores[some] = columns.fold(some, (score * tokens[some])[:, None])[:, 0]
        return scores

    def _importance(self, queries: Tensor, keys: Tensor, before: Tensor, window: int) -> Tensor:
        """[h, C] attention of the window to the columns before it.

        Args:
            queries: [h, window * G, D] fp32, scaled.
            keys: [h, C, D] fp32 of the columns.
            before: [h, C] bool.
        """
        logits = (queries @ keys.mT).unflatten(1, (window, -1)).amax(dim=2)
        attention = logits.masked_fill(~before[:, None], HIDDEN).softmax(dim=2) * before[:, None]
        if self.variant == CODE or self.kernel_size == 1:
            return max_or_mean_pool(attention.mean(dim=1), self.kernel_size, "max")
        half = self.kernel_size // 2
        pooled = max_within(attention.flatten(0, 1), half, half - 1)
        return pooled.view_as(attention).mean(dim=1)

    def _redundancy(self, keys: Tensor, compared: Tensor, first: Tensor) -> Tensor:
        """[h, C] share of each compared column in the redundancy of all.

        Args:
            keys: [h, C, D] fp32 of the columns, in the order of tokens.
            compared: [h, C] bool: columns whose keys are compared.
            first: [h, 1] column of the first token.
        """
        norms = torch.linalg.vector_norm(keys, dim=2, keepdim=True)
        unit = (keys / (norms + 1e-8)).masked_fill_(~compared[..., None], 0)
        sums = (unit @ unit.sum(dim=1)[..., None])[..., 0] - unit.square().sum(dim=2)
        num_heads, num_columns, _ = unit.shape
        index = torch.arange(num_columns, dtype=torch.int32, device=keys.device)
        rows = max(1, tile_bytes(keys.device) // (4 * num_heads * num_columns))
        for start in range(0, num_columns, rows):
            cosines = unit[:, start : start + rows] @ unit.mT
            cosines.diagonal(start, 1, 2).zero_()
            alike = torch.where(cosines > self.threshold, index, -1).amax(dim=2).long()
            latest = torch.where(alike < 0, first, alike)
            links = cosines.gather(2, latest[..., None])[..., 0]
            if self.variant == CODE:
                sums.scatter_add_(1, latest, -links)
            else:
                sums[:, start : start + rows] -= links * (alike >= 0)
        means = sums / compared.sum(dim=1, keepdim=True).clamp_min(1)
        return means.masked_fill(~compared, HIDDEN).softmax(dim=1)
