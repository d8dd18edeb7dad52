"""Tensor kernels of the policies: one name each, whatever the device."""

from vllm_kvcompress.kernels.scores_torch import (
    keydiff_scores,
    max_or_mean_pool,
    value_norms_l1,
    value_norms_l2,
    window_mass,
)

__all__ = ["keydiff_scores", "max_or_mean_pool", "value_norms_l1", "value_norms_l2", "window_mass"]
