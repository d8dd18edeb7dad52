"""Kept entries copied to fresh pages."""

from vllm_kvcompress.kernels.compaction import reference
from vllm_kvcompress.kernels.dispatch import by_device

compact_pages = by_device(reference.compact_pages, "compaction.compact_triton")
