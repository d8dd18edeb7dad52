"""Kept values with what evicted ones give to them (CaM)."""

from vllm_kvcompress.kernels.merging.spread_values import reference

spread_values = reference.spread_values
