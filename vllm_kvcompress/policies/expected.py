"""Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution, arXiv 2510.00636."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.window_mass import HIDDEN
from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter


@dataclass(frozen=True)
class Expected(Policy):
    """Keeps what future queries are expected to attend to, weighted by the value's norm.

    Queries before RoPE are assumed to be normal, with the mean and covariance of the last
    window_size ones; RoPE averaged over the next n_future_positions gives mu and Sigma. With tau
    the softmax scale, the logarithm of a key's expected attention is
    k mu tau + k Sigma k tau^2 / 2. The score is the softmax of that, averaged over the KV head's
    group, plus epsilon, times the norm of the value (section 3). The first n_sink tokens are kept
    and left out of the softmax. Parameters are named as in kvpress's ExpectedAttentionPress, which
    observes all queries of the prompt.
    """

    name = "expected"
    stages = Stages(
        score="expected attention of the next n_future_positions queries, times the value's norm",
        protect="the first n_sink tokens",
        allocate="the same for every layer and head",
        select="highest score",
    )
    takes = ("adakv",)

    window_size: int = parameter(256, "last queries that give mean and covariance", minimum=1)
    n_future_positions: int = parameter(512, "positions that RoPE is averaged over", minimum=1)
    n_sink: int = parameter(4, "first tokens that are kept", minimum=0)
    use_covariance: int = parameter(1, "0: by the mean query alone", 0, 1)
    use_vnorm: int = parameter(1, "0: without the values' norms", 0, 1)
    epsilon: float = parameter(0.0, "added before the values' norms are multiplied", 0.0)

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.window_size, rotary=True, values=bool(self.use_vnorm))

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.n_sink)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 at least 0."""
        mean, covariance = self._future_queries(view)
        scores = torch.empty(view.num_heads, view.num_entries, device=view.device)
        for some in view.kv.head_slices():
            keys = torch.cat([view.kv.clean(0, some), view.kv.tail_keys()[some]], dim=1).float()
            logits = self._expected_logits(keys, mean[some], covariance[some], view.scale)
            seen = torch.cat([view.valid[some], keys.new_ones(keys.shape[0], view.num_tail) > 0], 1)
            seen[:, : self.n_sink] = False
            attention = logits.masked_fill(~seen[:, None], HIDDEN).softmax(dim=2)
            score = attention.mean(dim=1)[:, : view.num_entries]
            if self.use_vnorm:
                values = view.kv.clean(1, some)
                norms = torch.linalg.vector_norm(values, dim=2, dtype=torch.float32)
                score = (score + self.epsilon) * norms
            scores[some] = score
        return scores

    def _expected_logits(
        self, keys: Tensor, mean: Tensor, covariance: Tensor, scale: float
    ) -> Tensor:
        """[h, G, n] of keys [h, n, D], with queries' mean [h, G, D] and covariance [h, G, D, D]."""
        logits = scale * (mean @ keys.transpose(1, 2))
        if self.use_covariance:
            for member in range(mean.shape[1]):
                spread = (keys @ covariance[:, member] * keys).sum(dim=2)
                logits[:, member] += scale**2 / 2 * spread
        return logits

    def _future_queries(self, view: LayerView) -> tuple[Tensor, Tensor]:
        """[H, G, D] and [H, G, D, D] fp32 mean and covariance of queries under averaged RoPE."""
        assert view.rotary is not None
        count = view.queries.shape[0]
        # A short prompt's first queries are outliers, as its first keys are.
        skipped = max(0, min(count - 1, count + self.n_sink - view.num_entries - view.num_tail))
        queries = view.queries[skipped:].float().unflatten(1, (view.num_heads, -1))
        queries = queries.permute(1, 2, 0, 3)
        ahead = torch.arange(queries.shape[2], 0, -1, device=view.device)
        queries = view.rotary.rerotate(queries, ahead.expand(queries.shape[:3]))
        mean = queries.sum(dim=2, keepdim=True) / max(1, queries.shape[2])
        queries = queries - mean
        covariance = queries.transpose(2, 3) @ queries / max(1, queries.shape[2])
        turn = view.rotary.averaged(self.n_future_positions, queries.shape[3])
        return (mean @ turn)[:, :, 0], turn.T @ covariance @ turn
