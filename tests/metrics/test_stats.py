from __future__ import annotations

import json
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_kvcompress.metrics.stats import (
    FORGOTTEN_BECAUSE,
    DurationRecord,
    EventRecord,
    SkippedRecord,
    StepStats,
)
from vllm_kvcompress.vllm_plugin.compat.messages import attach_stats, detach_stats

COUNTS = st.integers(0, 2**40)
EVENTS = st.builds(
    EventRecord,
    policy=st.text(max_size=10),
    trigger=st.sampled_from(["prompt", "chunk", "decode"]),
    source_tokens=COUNTS,
    resident_tokens=COUNTS,
    blocks_freed=COUNTS,
    blocks_written=COUNTS,
)
DURATIONS = st.builds(DurationRecord, st.text(max_size=10), st.floats(0, 1e6))
SKIPPED = st.builds(SkippedRecord, st.text(max_size=10), st.text(max_size=10), COUNTS)
STEPS = st.builds(
    StepStats,
    events=st.lists(EVENTS, max_size=4),
    durations=st.lists(DURATIONS, max_size=4),
    skipped=st.lists(SKIPPED, max_size=3),
    logical_tokens=COUNTS,
    resident_tokens=COUNTS,
    contexts_reused=COUNTS,
    conversations_continued=COUNTS,
    continued_tokens=COUNTS,
    forgotten=st.dictionaries(st.sampled_from(FORGOTTEN_BECAUSE), COUNTS),
    reclaimable_blocks=COUNTS,
    most_held_tokens=COUNTS,
)


@given(STEPS)
def test_step_survives_pickle_json_and_msgpack(step: StepStats) -> None:
    assert pickle.loads(pickle.dumps(step)) == step
    assert StepStats.from_dict(json.loads(json.dumps(step.to_dict()))) == step
    packed = msgspec.msgpack.encode(step.to_dict())
    assert StepStats.from_dict(msgspec.msgpack.decode(packed)) == step


@given(STEPS)
def test_step_travels_in_vllms_scheduler_statistics(step: StepStats) -> None:
    """Uses the encoder and decoder between vLLM's engine core and its API process."""
    stats = SchedulerStats(num_running_reqs=3)
    attach_stats(stats, step.to_dict())
    received = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))
    assert received.num_running_reqs == 3
    values = detach_stats(received)
    assert values is not None
    assert StepStats.from_dict(values) == step


def test_statistics_of_stock_vllm_carry_nothing_of_ours() -> None:
    assert detach_stats(SchedulerStats()) is None
    stats = SchedulerStats(cudagraph_stats=CUDAGraphStat(5, 8, 3, "PIECEWISE"))
    assert detach_stats(stats) is None
    assert stats == SchedulerStats(cudagraph_stats=CUDAGraphStat(5, 8, 3, "PIECEWISE"))


@pytest.mark.parametrize("own", [None, CUDAGraphStat(5, 8, 3, "PIECEWISE")])
def test_detaching_our_statistics_leaves_those_of_vllm(own: CUDAGraphStat | None) -> None:
    """vLLM's loggers run after ours, and count CUDA graphs if asked to."""
    stats = SchedulerStats(cudagraph_stats=own)
    attach_stats(stats, StepStats(logical_tokens=7).to_dict())
    assert stats != SchedulerStats(cudagraph_stats=own)
    assert detach_stats(stats) == StepStats(logical_tokens=7).to_dict()
    assert stats == SchedulerStats(cudagraph_stats=own)


@pytest.mark.parametrize(
    ("logical", "resident", "ratio"), [(0, 0, 1.0), (100, 100, 1.0), (400, 100, 4.0)]
)
def test_compression_ratio(logical: int, resident: int, ratio: float) -> None:
    step = StepStats(logical_tokens=logical, resident_tokens=resident)
    assert step.compression_ratio == ratio


def test_fields_that_do_not_exist_are_not_swallowed() -> None:
    with pytest.raises(TypeError):
        StepStats.from_dict({**StepStats().to_dict(), "evicted": 1})
