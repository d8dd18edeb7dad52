"""Norms of values after the output projection (CriticalKV)."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.value_norms import reference

value_norms_l1 = by_device(reference.value_norms_l1, "value_norms.value_norms_triton")
value_norms_l2 = by_device(reference.value_norms_l2, "value_norms.value_norms_triton")
