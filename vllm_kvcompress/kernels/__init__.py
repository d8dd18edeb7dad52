"""Tensor kernels of the policies: one name each, whatever the device."""

from vllm_kvcompress.kernels.attention_torch import attention_with_lse
from vllm_kvcompress.kernels.moments_torch import (
    add_to_moments,
    correct_with_moments,
    moment_residuals,
    moment_size,
)
from vllm_kvcompress.kernels.nearest_torch import nearest_keys
from vllm_kvcompress.kernels.neighbours_torch import key_distances, neighbour_cosines
from vllm_kvcompress.kernels.perturbation_torch import window_perturbation
from vllm_kvcompress.kernels.received_torch import merge_into, spread_values
from vllm_kvcompress.kernels.scores_torch import (
    keydiff_scores,
    max_or_mean_pool,
    value_norms_l1,
    value_norms_l2,
    window_mass,
)
from vllm_kvcompress.kernels.value_residuals_torch import value_residuals

__all__ = [
    "add_to_moments",
    "attention_with_lse",
    "correct_with_moments",
    "key_distances",
    "keydiff_scores",
    "max_or_mean_pool",
    "merge_into",
    "moment_residuals",
    "moment_size",
    "nearest_keys",
    "neighbour_cosines",
    "spread_values",
    "value_norms_l1",
    "value_norms_l2",
    "value_residuals",
    "window_mass",
    "window_perturbation",
]
