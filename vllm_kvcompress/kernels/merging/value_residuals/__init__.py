"""How far values are from their weighted mean."""

from vllm_kvcompress.kernels.merging.value_residuals import reference

value_residuals = reference.value_residuals
