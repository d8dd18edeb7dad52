"""Queries of a decode step, copied to wherever they are remembered."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.recording import reference

record_queries = by_device(reference.record_queries, "recording.record_triton")
