"""Kernels over pages, one name each: Triton for pages on a GPU, plain torch for any others."""

from __future__ import annotations

from vllm_kvcompress.kernels import paged_torch
from vllm_kvcompress.kernels.dispatch import by_device

nearest_keys = by_device(paged_torch.nearest_keys, "merging.nearest_keys.nearest_triton")
value_norms_l1 = by_device(paged_torch.value_norms_l1, "value_norms.value_norms_triton")
window_mass = by_device(paged_torch.window_mass, "window_mass.window_mass_triton")
window_perturbation = by_device(
    paged_torch.window_perturbation, "window_perturbation.perturbation_triton"
)

# Where a kernel of its own would gain nothing that counts, the twin serves everywhere.
add_to_moments = paged_torch.add_to_moments
key_distances = paged_torch.key_distances
keydiff_scores = paged_torch.keydiff_scores
merge_groups = paged_torch.merge_groups
merge_into = paged_torch.merge_into
moment_residuals = paged_torch.moment_residuals
neighbour_cosines = paged_torch.neighbour_cosines
spread_values = paged_torch.spread_values
value_norms_l2 = paged_torch.value_norms_l2
value_residuals = paged_torch.value_residuals
