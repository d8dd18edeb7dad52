"""Drafts by the model itself: draft steps read a part of the cache, the next step verifies.

    slots     [ verified tokens ][ last token ][ draft 1 ] ... [ draft K-1 ]
    written   by steps that read  by draft steps, and again by the step that verifies, which reads
              everything          everything

Draft steps write keys and values to the request's own blocks, for which the scheduler reserves
room. Nothing reads them but later draft steps: the step that verifies overwrites them first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvcompress.attention.batch import HostNumbers
from vllm_kvcompress.attention.drafting import DraftReads
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.scheduling.draft_pace import DraftPace
from vllm_kvcompress.vllm_plugin.compat.worker import (
    are_all_greedy,
    block_rows,
    gone_request_ids,
    input_rows,
    metadata_builder,
    most_new_tokens,
    run_model,
)
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression


class SelfDrafts:
    """The proposer that vLLM makes, by the path in its speculative configuration.

    vLLM hands a proposer tokens alone, so that it asks the worker's compression for drafts.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Takes the configuration, as vLLM calls it."""

    def load_model(self, model: Any) -> None:
        """Loads nothing, since the model is the one that is served."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens: HostNumbers,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Returns drafts for every row of the batch, with `num_tokens` tokens each."""
        drafter = CompressedBackend.compression.drafter
        assert drafter is not None
        return drafter.propose(sampled_token_ids, num_tokens)


@dataclass(frozen=True)
class _Cycle:
    """Drafts that the next step verifies.

    Attributes:
        request_ids: requests of the batch, in order.
        num_tokens: their tokens in all.
        num_drafts: number of drafts of each.
        started: when drafting began, in seconds.
    """

    request_ids: list[str]
    num_tokens: int
    num_drafts: int
    started: float


class Drafter:
    """Drafts for the batches of one worker, as many tokens as pay.

    Attributes:
        pace: chooses how many tokens are drafted.
    """

    def __init__(self, group: GroupCompression, reads: DraftReads, model_runner: Any) -> None:
        self.pace = DraftPace()
        self._reads = reads
        self._runner = model_runner
        self._layers = list(group.layer_index)
        self._builder = metadata_builder(model_runner, group.group, self._layers[0])
        self._only_decodes = False
        self._num_verified: dict[str, int] = {}
        self._cycle: _Cycle | None = None

    @classmethod
    def of(cls, compression: WorkerCompression, model_runner: Any) -> Self:
        """Makes the drafter of a worker whose cache has been allocated.

        Raises:
            UnsupportedError: the model has layers whose states a draft step would change.
        """
        num_groups = len(model_runner.kv_cache_config.kv_cache_groups)
        if num_groups != 1 or len(compression.groups) != 1:
            raise UnsupportedError(
                "--kv-draft: expected a model of full-attention layers only, found "
                f"{num_groups} cache groups, whose windows or states draft steps would change; "
                "remove --kv-draft."
            )
        (group,), rule = compression.groups.values(), compression.settings.draft_rule
        assert rule is not None
        group.drafts = DraftReads(rule, group.tables.pool)
        return cls(group, group.drafts, model_runner)

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Takes the numbers of drafts that the step verifies."""
        for request_id in gone_request_ids(scheduler_output):
            self.pace.forget(request_id)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._num_verified = {name: len(tokens) for name, tokens in drafts.items()}
        self._only_decodes = all(
            number == 1 + self._num_verified.get(name, 0)
            for name, number in scheduler_output.num_scheduled_tokens.items()
        )

    def propose(self, sampled: list[list[int]], num_tokens: HostNumbers) -> list[list[int]]:
        """Drafts as many tokens for every request as pay.

        None are drafted beside prompts that are read, and beside requests with a temperature.

        Args:
            sampled: new tokens of every row of the batch.
            num_tokens: [any] tokens of every row, including these.
        """
        request_ids = input_rows(self._runner)
        self._note_verified(request_ids, sampled)
        can_draft = self._only_decodes and are_all_greedy(self._runner)
        if not can_draft or not all(sampled):
            return [[] for _ in sampled]
        lengths: HostNumbers = num_tokens[: len(sampled)].astype(np.int64)
        chosen = self.pace.choose(request_ids, int(lengths.sum()))
        table, room = block_rows(self._runner)
        most = int((room[: len(lengths)] - lengths).min()) + 1
        number = max(0, min(chosen, most, most_new_tokens(self._runner) - 1))
        self._cycle = _Cycle(list(request_ids), int(lengths.sum()), number, time.perf_counter())
        if not number:
            return [[] for _ in sampled]
        last = torch.tensor([tokens[-1] for tokens in sampled], dtype=torch.int32)
        return self._draft(number, last, lengths, table)

    def _note_verified(self, request_ids: list[str], sampled: list[list[int]]) -> None:
        """Tells the pace what was accepted, and how long the cycle took that ends now."""
        for name, tokens in zip(request_ids, sampled, strict=True):
            if self._num_verified.get(name) and tokens:
                self.pace.note_verified(name, self._num_verified[name], len(tokens) - 1)
        cycle, self._cycle = self._cycle, None
        if cycle is None or not self._only_decodes or cycle.request_ids != request_ids:
            return
        seconds = time.perf_counter() - cycle.started
        self.pace.note_cycle(len(request_ids), cycle.num_tokens, cycle.num_drafts, seconds)

    def _draft(
        self, number: int, token_ids: Tensor, lengths: HostNumbers, block_table: Tensor
    ) -> list[list[int]]:
        """Runs draft steps; the first feeds [rows] last tokens, the others the former's drafts."""
        drafts = []
        for _ in range(number):
            token_ids = self._step(token_ids, lengths, block_table)
            drafts.append(token_ids)
            lengths = lengths + 1
        columns: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return columns

    def _step(self, token_ids: Tensor, lengths: HostNumbers, block_table: Tensor) -> Tensor:
        """Returns the [rows] likeliest tokens behind `token_ids`, which end at [rows] lengths."""
        num_rows, size = len(lengths), self._builder.kv_cache_spec.block_size
        host_lengths = torch.from_numpy(lengths.astype(np.int32))
        positions = torch.from_numpy(lengths - 1)
        blocks = block_table.gather(1, (positions // size)[:, None])[:, 0]
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=host_lengths,
            seq_lens_cpu_upper_bound=host_lengths,
            num_reqs=num_rows,
            num_actual_tokens=num_rows,
            max_query_len=1,
            max_seq_len=int(lengths.max()),
            block_table_tensor=block_table,
            slot_mapping=blocks.to(torch.int64) * size + positions % size,
        )
        request_ids = input_rows(self._runner)
        reads = self._reads.read(request_ids, lengths, host_lengths, block_table)
        metadata = self._builder.build_draft(common, reads)
        logits = run_model(
            self._runner,
            token_ids,
            positions,
            dict.fromkeys(self._layers, metadata),
            dict.fromkeys(self._layers, common.slot_mapping),
        )
        return logits.argmax(dim=-1).to(torch.int32)
