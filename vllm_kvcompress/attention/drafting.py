"""Draft steps: uncompressed requests that read a part of their pages."""

from __future__ import annotations

from torch import Tensor

from vllm_kvcompress.attention.batch import HostNumbers, ResidentBatches
from vllm_kvcompress.attention.reading import SparseRead, SparseReads
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.scheduling.read_rule import ReadRule


class DraftReads:
    """Page tables of requests that draft, and what they read.

    The steps that verify drafts know nothing of these tables: they read everything, with the
    kernels and block tables of stock vLLM.

    Args:
        rule: the pages that draft steps read.
        pool: pages of the cache group.

    Attributes:
        readers: chooses the pages.
    """

    def __init__(self, rule: ReadRule, pool: PagePool) -> None:
        self.readers = SparseReads(rule, PageTables(pool))
        self._batches = ResidentBatches(self.readers.tables)

    def forget(self, request_id: str) -> None:
        """Drops a request; ignores unknown ones."""
        self.readers.tables.release(request_id)

    def read(
        self, request_ids: list[str], lengths: HostNumbers, seq_lens: Tensor, block_table: Tensor
    ) -> list[SparseRead]:
        """Plans the reads of a draft step, in which every request has one token.

        Args:
            request_ids: request ids of all rows.
            lengths: [rows] logical tokens, including this step.
            seq_lens: [rows] int32 the same on the device.
            block_table: [rows, max_blocks] int32 block ids by logical block.
        """
        tables = self.readers.tables
        for request_id in request_ids:
            if request_id not in tables.slots:
                tables.acquire(request_id)
        batches = self._batches.read(request_ids, lengths, seq_lens, block_table)
        return [self.readers.reading(batch) for batch in batches]
