"""Tensor kernels of the policies: one name each, whatever the device."""

from vllm_kvcompress.kernels.attention.reference import attention_with_lse
from vllm_kvcompress.kernels.keydiff.reference import keydiff_scores
from vllm_kvcompress.kernels.merging.merge_into.reference import merge_into
from vllm_kvcompress.kernels.merging.moments.reference import (
    add_to_moments,
    moment_residuals,
    moment_size,
)
from vllm_kvcompress.kernels.merging.nearest_keys.reference import nearest_keys
from vllm_kvcompress.kernels.merging.neighbours.reference import key_distances, neighbour_cosines
from vllm_kvcompress.kernels.merging.spread_values.reference import spread_values
from vllm_kvcompress.kernels.merging.value_residuals.reference import value_residuals
from vllm_kvcompress.kernels.pooling.reference import max_or_mean_pool
from vllm_kvcompress.kernels.value_norms.reference import value_norms_l1, value_norms_l2
from vllm_kvcompress.kernels.window_mass.reference import window_mass
from vllm_kvcompress.kernels.window_perturbation.reference import window_perturbation

__all__ = [
    "add_to_moments",
    "attention_with_lse",
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
