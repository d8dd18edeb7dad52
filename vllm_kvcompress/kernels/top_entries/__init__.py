"""The best entries of each head, and which place each entry has."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.top_entries import reference

top_entries = by_device(reference.top_entries, "top_entries.top_entries_triton")
ranks = reference.ranks
