"""Kernels over pages, one name each: Triton for pages on a GPU, plain torch for any others."""

from __future__ import annotations

from vllm_kvcompress.kernels import paged_shapes as shapes
from vllm_kvcompress.kernels import paged_torch
from vllm_kvcompress.kernels.dispatch import by_device

add_to_moments = by_device(paged_torch.add_to_moments, shapes, "moments_triton")
compact_pages = by_device(paged_torch.compact_pages, shapes, "compact_triton")
correct_with_moments = by_device(paged_torch.correct_with_moments, shapes, "correction_triton")
decode_attention = by_device(paged_torch.decode_attention, shapes, "decode_triton")
prefill_attention = by_device(paged_torch.prefill_attention, shapes, "prefill_triton")
merge_groups = by_device(paged_torch.merge_groups, shapes, "merge_triton")
key_distances = by_device(paged_torch.key_distances, shapes, "neighbours_triton")
keydiff_scores = by_device(paged_torch.keydiff_scores, shapes, "keydiff_triton")
merge_into = by_device(paged_torch.merge_into, shapes, "merge_into_triton")
moment_residuals = by_device(paged_torch.moment_residuals, shapes, "residuals_triton")
nearest_keys = by_device(paged_torch.nearest_keys, shapes, "nearest_triton")
neighbour_cosines = by_device(paged_torch.neighbour_cosines, shapes, "neighbours_triton")
spread_values = by_device(paged_torch.spread_values, shapes, "spread_triton")
value_norms_l1 = by_device(paged_torch.value_norms_l1, shapes, "value_norms_triton")
value_norms_l2 = by_device(paged_torch.value_norms_l2, shapes, "value_norms_triton")
value_residuals = by_device(paged_torch.value_residuals, shapes, "value_residuals_triton")
window_mass = by_device(paged_torch.window_mass, shapes, "window_mass_triton")
window_perturbation = by_device(paged_torch.window_perturbation, shapes, "perturbation_triton")
