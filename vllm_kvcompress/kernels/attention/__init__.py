"""Attention over pages, with a bias for each entry and the log-sum-exp."""

from vllm_kvcompress.kernels.attention import reference
from vllm_kvcompress.kernels.dispatch import by_device

attention_with_lse = reference.attention_with_lse
decode_attention = by_device(reference.decode_attention, "attention.decode_triton")
decode_rows = by_device(reference.decode_rows, "attention.decode_triton")
prefill_attention = by_device(reference.prefill_attention, "attention.prefill_triton")
sum_tiles = by_device(reference.sum_tiles, "attention.shares_triton")
