"""The canary (`--kv-shadow`): scores some answers again with the full cache, while nothing waits.

    request     [ prompt ][ answer, sampled with the compressed cache ]
    its shadow  [ prompt  +  answer ]  one prompt, uncompressed; its log-probabilities are compared

Loss of an answer in nats per token: the mean over its tokens of log p_compressed - log p_full, both
before temperature and penalties. Of answers sampled at temperature 1 its expectation is the KL
divergence of the two; it is 0 where compression changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from vllm_kvcompress.metrics.stats import (
    SHADOW_DROPPED,
    SHADOW_FAILED,
    SHADOW_SCORED,
    SHADOW_UNCOMPRESSED,
    ShadowRecord,
    StepStats,
)
from vllm_kvcompress.vllm_plugin.compat.scheduler import scoring_request, with_best_candidate
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import has_only_tokens

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.scheduler_side.request_record import RequestCompression
    from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable

MAX_PENDING_TOKENS = 2**17  # prompts and answers that wait to be scored
CHUNK_TOKENS = 256  # of a shadow in one step, so that requests beside it are hardly slower


@dataclass
class Answer:
    """Answer of one sampled request.

    Attributes:
        request: the request, with its tokens.
        num_asked: log-probabilities per token that the client asked for; None: none.
        logprobs: log-probability of each token, as the compressed cache gave it.
        best: most likely token at each position.
        ended: whether the request has ended.
        compressed: whether it had been compressed, or read in part, by then.
    """

    request: Request
    num_asked: int | None
    logprobs: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    ended: bool = False
    compressed: bool = False

    def take(self, output: EngineCoreOutput) -> None:
        """Takes a step's log-probabilities, and leaves the client those that it asked for."""
        if output.new_logprobs is None:
            return
        ids, logprobs, ranks, *rest = output.new_logprobs
        self.logprobs += logprobs[:, 0].tolist()
        self.best += ids[:, 1].tolist()
        if self.num_asked is None:
            output.new_logprobs = None
        elif self.num_asked == 0:
            kind = type(output.new_logprobs)
            output.new_logprobs = kind(ids[:, :1], logprobs[:, :1], ranks, *rest)


class Canary:
    """Samples requests, and has their answers scored one after the other.

    Attributes:
        stats: where results are counted.
        num_sent: answers that were queued to be scored, those counted again that gave way.
    """

    def __init__(self, fraction: float, table: RequestTable, max_model_len: int) -> None:
        self._fraction = fraction
        self._table = table
        self._max_tokens = max_model_len - 1  # vLLM samples a token behind a prompt
        self._sampled: dict[str, Answer] = {}
        self._pending: deque[Answer] = deque()
        self._scored: Answer | None = None  # whose shadow is in the scheduler
        self._shadow_id = ""
        self.num_sent = 0
        self.stats = StepStats()

    @property
    def shadow_id(self) -> str | None:
        """Id of the shadow in the scheduler; None: there is none."""
        return None if self._scored is None else self._shadow_id

    def watch(self, request: Request) -> None:
        """Has a new request's log-probabilities computed, if it is one of the fraction.

        The hash of its id decides. Left out are requests whose logits something else masks, and
        those that are not tokens alone.
        """
        params = request.sampling_params
        if crc32(request.request_id.encode()) >= self._fraction * 2**32 or params is None:
            return
        is_plain = has_only_tokens(request) and not request.use_structured_output
        if is_plain and not request.resumable and params.logprob_token_ids is None:
            self._sampled[request.request_id] = Answer(request, params.logprobs)
            request.sampling_params = with_best_candidate(params)

    def end(self, request: Request, record: RequestCompression) -> None:
        """Notes that a request ends; its last log-probabilities may still follow."""
        if request.request_id == self.shadow_id:
            self._scored = None
            self.stats.count_shadow(SHADOW_FAILED)
        self._table.shadows.pop(request.request_id, None)
        answer = self._sampled.get(request.request_id)
        if answer is not None:
            answer.ended = True
            event = record.ledger.first_event_position
            answer.compressed = event is not None or record.read_rule is not None

    def collect(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Takes a step's log-probabilities, removes the shadow's output, queues ended answers."""
        if not self._sampled and not self._shadow_id:
            return
        for each in outputs.values():
            for output in each.outputs:
                if (answer := self._sampled.get(output.request_id)) is not None:
                    answer.take(output)
            if self._shadow_id:
                each.outputs = [one for one in each.outputs if one.request_id != self._shadow_id]
        if self._scored is None:
            self._shadow_id = ""
        for request_id in [name for name, answer in self._sampled.items() if answer.ended]:
            self._queue(self._sampled.pop(request_id))

    def _queue(self, answer: Answer) -> None:
        """Queues an ended answer, unless there is nothing to compare or too much is queued."""
        num_tokens = answer.request.num_output_tokens
        if not answer.compressed or not num_tokens:
            self.stats.count_shadow(SHADOW_UNCOMPRESSED)
        elif len(answer.logprobs) != num_tokens:
            self.stats.count_shadow(SHADOW_FAILED)
        elif _num_tokens([*self._pending, answer]) > MAX_PENDING_TOKENS:
            self.stats.count_shadow(SHADOW_DROPPED)
        else:
            self._pending.append(answer)

    def next_shadow(self, room_tokens: int, is_idle: bool) -> Request | None:
        """Returns the request that scores the oldest answer; None: there is none that fits.

        Args:
            room_tokens: how many tokens it may have.
            is_idle: whether no request runs, so that there will never be more room.
        """
        if self._scored is not None:
            return None
        while self._pending and is_idle and self._pending[0].request.num_tokens > room_tokens:
            self._pending.popleft()
            self.stats.count_shadow(SHADOW_DROPPED)
        if not self._pending or self._pending[0].request.num_tokens > room_tokens:
            return None
        self._scored = answer = self._pending.popleft()
        self.num_sent += 1
        self._shadow_id = f"kvcompress-shadow-{self.num_sent}"
        tokens = list(answer.request.all_token_ids[: self._max_tokens])
        # The last token before the answer is computed anew, since its logits are the first ones.
        self._table.shadows[self._shadow_id] = answer.request.num_prompt_tokens - 1
        return scoring_request(answer.request, self._shadow_id, tokens)

    def take_back(self) -> str:
        """Queues the answer again whose shadow is to be aborted; returns that one's id."""
        assert self._scored is not None
        self._pending.appendleft(self._scored)
        self._scored = None
        return self._shadow_id

    def score(self, prompt_logprobs: Mapping[str, Any]) -> None:
        """Counts the loss of an answer whose shadow a step has finished."""
        answer, scores = self._scored, prompt_logprobs.get(self._shadow_id)
        if answer is None or scores is None:
            return
        self._scored = None
        num_prompt = answer.request.num_prompt_tokens
        number = min(answer.request.num_tokens, self._max_tokens) - num_prompt
        full = scores.logprobs[-number:, 0].tolist()
        best = scores.logprob_token_ids[-number:, 1].tolist()
        lost = math.fsum(answer.logprobs[:number]) - math.fsum(full)
        if number < 1 or len(full) != number or not math.isfinite(lost):
            self.stats.count_shadow(SHADOW_FAILED)
            return
        num_changed = sum(map(int.__ne__, answer.best, best))
        self.stats.count_shadow(SHADOW_SCORED)
        self.stats.add_shadow(ShadowRecord(number, lost, num_changed))


def _num_tokens(answers: Iterable[Answer]) -> int:
    return sum(answer.request.num_tokens for answer in answers)
