"""Scheduling: order, preemption, aborts, and that every request ends."""

from __future__ import annotations

from typing import Any

from vllm_scenario_parts.engine import STEP, TOGETHER, Ask, Engine, each_alone, tokens
from vllm_scenario_parts.scenario import Registry, like

IN_ENGINE: Registry = []
SCHEDULER = "tests/v1/core/test_scheduler.py"
CORE = "tests/v1/engine/test_engine_core.py"


@like(IN_ENGINE, SCHEDULER, "test_add_requests", "test_finish_request", "test_schedule")
@like(IN_ENGINE, SCHEDULER, "test_priority_scheduling_fcfs_fallback")
def first_come_first_served(engine: Engine) -> Any:
    """Waiting requests start in the order of their arrival."""
    names = [f"r{number}" for number in range(3 * TOGETHER)]
    asks = [Ask(name, tokens(40, seed), 3) for seed, name in enumerate(names)]
    run = engine.run(*asks)
    assert run.started == names
    assert all(len(step) <= TOGETHER for step in run.steps)
    return run.facts()


@like(IN_ENGINE, SCHEDULER, "test_schedule_partial_requests", "chunked prefill")
@like(IN_ENGINE, SCHEDULER, "test_schedule_concurrent_partial_requests")
def prompts_in_parts(engine: Engine) -> Any:
    """Three prompts share steps that are smaller than each; others decode meanwhile."""
    asks = [Ask(f"r{n}", tokens(220, n), 6, at_step=n) for n in range(3)]
    asks.append(Ask("short", tokens(5, 9), 12))
    run = engine.run(*asks)
    assert all(sum(step.values()) <= STEP for step in run.steps)
    assert max(len(step) for step in run.steps) > 1
    engine.forget()
    alone = each_alone(engine, asks)
    assert {name: ended.tokens for name, ended in run.ended.items()} == alone
    return run.facts()


@like(
    *(IN_ENGINE, SCHEDULER, "test_priority_scheduling_basic_ordering"),
    *("test_priority_scheduling_arrival_time_tiebreaker",),
    *("test_priority_scheduling_mixed_priority_and_arrival",),
    *("test_priority_scheduling_with_limited_slots", "test_priority_scheduling_heap_property"),
)
def urgent_first(engine: Engine) -> Any:
    """Waiting requests start by priority, then by arrival."""
    priorities = [5, 1, 3, 1, 0, 5, 2, 3]
    asks = [Ask(f"r{n}", tokens(35, n), 5, priority=p) for n, p in enumerate(priorities)]
    run = engine.run(*asks)
    expected = sorted(range(8), key=lambda n: (priorities[n], n))
    assert run.started == [f"r{n}" for n in expected]
    return run.facts()


@like(
    *(IN_ENGINE, SCHEDULER, "test_priority_scheduling_preemption"),
    *("test_priority_scheduling_preemption_victim_selection",),
    *("test_priority_scheduling_equal_priority_preemption",),
    *("test_priority_scheduling_no_preemption_when_space_available",),
)
def urgent_ones_take_room(engine: Engine) -> Any:
    """In a full pool the least urgent request is preempted; among equals the latest."""
    asks = [Ask(f"r{n}", tokens(200, n), 80, priority=p) for n, p in enumerate([1, 3, 3])]
    asks.append(Ask("urgent", tokens(150, 7), 80, at_step=9, priority=0))
    run = engine.run(*asks)
    assert "urgent" not in run.preempted
    assert "r0" not in run.preempted
    if run.preempted:  # not where they take less room
        assert run.preempted[0] == "r2"
    engine.forget()
    alone = each_alone(engine, asks)
    assert {name: ended.tokens for name, ended in run.ended.items()} == alone
    return run.facts()


@like(IN_ENGINE, SCHEDULER, "test_preempt_during_execution", "test_scheduler_reset_prefix_cache")
@like(IN_ENGINE, "tests/v1/e2e/general/test_async_scheduling.py", "with preemption")
def outgrown_pool(engine: Engine) -> Any:
    """Requests that outgrow the pool have the outputs that they have alone."""
    asks = [Ask(f"r{n}", tokens(150 + n, n), 140) for n in range(TOGETHER)]
    run = engine.run(*asks)
    assert all(len(ended.tokens) == 140 for ended in run.ended.values())
    engine.forget()
    alone = each_alone(engine, asks)
    assert {name: ended.tokens for name, ended in run.ended.items()} == alone
    return run.facts()


@like(IN_ENGINE, SCHEDULER, "test_abort_request_while_waiting", "test_get_num_unfinished_requests")
@like(IN_ENGINE, CORE, "test_engine_core (abort while waiting, running and between)")
def aborts(engine: Engine) -> Any:
    """Aborts during prefill, waiting and decoding disturb no other request."""
    asks = [
        Ask("reading", tokens(300, 1), 5, abort_at=1),
        Ask("decoding", tokens(20, 2), 50, abort_at=12),
        Ask("at once", tokens(50, 3), 5, abort_at=0),
        *(Ask(f"stays{n}", tokens(90, 10 + n), 20) for n in range(4)),
        Ask("waiting", tokens(60, 4), 5, abort_at=2),
    ]
    run = engine.run(*asks)
    assert {*run.ended} == {f"stays{n}" for n in range(4)}
    return run.facts()


@like(IN_ENGINE, SCHEDULER, "test_stop_via_update_from_output", "test_check_stop_min_tokens")
def reasons_to_stop(engine: Engine) -> Any:
    """A stop token, the end of text, max_tokens and max_model_len end requests."""
    prompt = tokens(100, 5)
    said = engine.run(Ask("whole", prompt, 12)).ended["whole"].tokens
    position = said.index(said[6])
    asks = [
        Ask("token", prompt, 12, more={"stop_token_ids": [said[6]]}),
        Ask("late", prompt, 12, more={"stop_token_ids": [said[0]], "min_tokens": 12}),
        Ask("long", tokens(490, 6), 100),
    ]
    run = engine.run(*asks)
    ended = run.ended["token"]
    assert (ended.tokens, ended.reason) == (said[: position + 1], "stop")
    assert ended.stop_reason == said[6]
    assert len(run.ended["late"].tokens) == 12
    assert (len(run.ended["long"].tokens), run.ended["long"].reason) == (22, "length")
    return run.facts()


@like(IN_ENGINE, CORE, "test_engine_core_advanced_sampling", "test_engine_core_invalid_request_id")
@like(IN_ENGINE, "tests/v1/engine/test_input_processor_validation.py", "prompts that are too long")
def requests_that_cannot_be(engine: Engine) -> Any:
    """Impossible requests are refused on arrival, and the engine goes on."""
    from vllm.exceptions import VLLMValidationError

    refused = []
    for ask in (
        Ask("empty", []),
        Ask("too long", tokens(600, 1)),
        Ask("no token", [10**6]),
        Ask("no length", tokens(5, 1), 0),
    ):
        try:
            engine.add(ask)
        except (ValueError, VLLMValidationError) as error:
            refused.append([ask.name, type(error).__name__])
            continue
        raise AssertionError(f"{ask.name} was taken")
    assert len(engine.run(Ask("good", tokens(50, 2))).ended["good"].tokens) == 4
    return refused
