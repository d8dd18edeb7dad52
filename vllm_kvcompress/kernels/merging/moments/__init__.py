"""MomentKV's state of evicted entries, and what attention outputs it corrects."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.merging.moments import reference

add_to_moments = reference.add_to_moments
correct_with_moments = by_device(
    reference.correct_with_moments, "merging.moments.correction_triton"
)
moment_residuals = reference.moment_residuals
moment_size = reference.moment_size
pack_moments = reference.pack_moments
packed_size = reference.packed_size
unpack_moments = reference.unpack_moments
