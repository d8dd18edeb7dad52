"""The prefix cache and the block pool beneath it."""

from __future__ import annotations

from typing import Any

from vllm_scenario_parts.engine import BLOCK, POOL, Ask, Engine, tokens
from vllm_scenario_parts.scenario import Registry, like

IN_ENGINE: Registry = []
CACHING = "tests/v1/core/test_prefix_caching.py"
UTILS = "tests/v1/core/test_kv_cache_utils.py"


def _asked(engine: Engine, prompt: list[int], name: str = "r", **more: Any) -> tuple[Any, int]:
    """Returns what a request says, and how many of its tokens were cached."""
    ended = engine.run(Ask(name, prompt, 6, **more)).ended[name]
    return ended.tokens, ended.cached


@like(IN_ENGINE, CACHING, "test_prefill", "test_decode", "test_hash_block_correct_reuse")
@like(IN_ENGINE, UTILS, "test_request_block_hasher", "test_hash_tokens_different_*")
def hits(engine: Engine) -> Any:
    """Hits are full blocks up to the first difference, never the last token; replies count too."""
    engine.forget()
    prompt = tokens(200, 1)
    first, cached = _asked(engine, prompt)
    assert cached == 0
    answers = []
    for again in (prompt, prompt[:192], prompt[:100] + tokens(80, 2), [9, *prompt[1:]]):
        said, cached = _asked(engine, again)
        assert cached < len(again)
        assert cached % BLOCK == 0
        if again == prompt:
            assert said == first
        answers.append([said, cached])
    assert answers[0][1] > 0
    assert answers[3][1] == 0
    longer, cached = _asked(engine, prompt + first + tokens(40, 3))
    return [*answers, [longer, cached]]


@like(IN_ENGINE, CACHING, "test_basic_prefix_caching_disabled", "test_reset_prefix_cache")
def forgotten(engine: Engine) -> Any:
    """Resetting the cache fails while a request runs; afterwards nothing is hit."""
    prompt = tokens(150, 4)
    first, _ = _asked(engine, prompt)
    assert _asked(engine, prompt)[1] > 0
    engine.add(Ask("runs", prompt, 4))
    engine._engine.step()
    assert not engine.forget()
    while engine._engine.has_unfinished_requests():
        engine._engine.step()
    engine.check_empty()
    assert engine.forget()
    said, cached = _asked(engine, prompt)
    assert (said, cached) == (first, 0)
    return first


@like(IN_ENGINE, CACHING, "test_cache_key_salting")
@like(IN_ENGINE, UTILS, "test_generate_block_hash_extra_keys_cache_salt")
def salts(engine: Engine) -> Any:
    """Requests hit only blocks of their own salt."""
    engine.forget()
    prompt = tokens(160, 5)
    answers = [_asked(engine, prompt, salt=salt) for salt in ("a", "a", "b", None, None, "b")]
    assert [cached > 0 for _, cached in answers] == [False, True, False, False, True, True]
    assert all(said == answers[0][0] for said, _ in answers)
    return [list(each) for each in answers]


@like(IN_ENGINE, CACHING, "test_evict", "test_computed_blocks_not_evicted")
@like(IN_ENGINE, "tests/v1/core/test_block_pool.py", "the oldest block goes first")
def evicted(engine: Engine) -> Any:
    """Other requests evict a prompt's blocks, the last ones first."""
    engine.forget()
    prompt = tokens(300, 6)
    first, _ = _asked(engine, prompt)
    answers = []
    for number in range(POOL * BLOCK // 300 + 2):
        _asked(engine, tokens(300, 20 + number))
    said, cached = _asked(engine, prompt)
    assert said == first
    answers.append(cached)
    _asked(engine, tokens(480, 50))
    said, cached = _asked(engine, prompt)
    assert said == first
    return [*answers, cached, said]


@like(IN_ENGINE, CACHING, "test_prefill_not_enough_free_blocks_with_computed_blocks")
@like(IN_ENGINE, "tests/v1/core/test_single_type_kv_cache_manager.py", "evictable blocks")
def hits_without_room(engine: Engine) -> Any:
    """A request with a hit waits for its missing blocks, and is served."""
    engine.forget()
    shared = tokens(256, 7)
    asks = [Ask("holds", shared + tokens(180, 8), 30), Ask("other", tokens(250, 9), 30)]
    asks.append(Ask("hits", shared + tokens(190, 10), 30, at_step=8))
    run = engine.run(*asks)
    assert len(run.ended) == 3
    return run.facts()


@like(IN_ENGINE, CACHING, "test_prefill (blocks that two requests share)")
def shared_blocks(engine: Engine) -> Any:
    """Four concurrent requests with one prefix hold its blocks once."""
    engine.forget()
    shared = tokens(256, 11)
    asks = [Ask("first", [*shared, 5], 4)]
    asks += [Ask(f"r{n}", shared + tokens(10, n), 12, at_step=4) for n in range(4)]
    run = engine.run(*asks)
    assert all(run.ended[f"r{n}"].cached > 0 for n in range(4))
    assert not run.preempted
    return run.facts()


@like(IN_ENGINE, CACHING, "test_prefill_plp")
def prompt_logprobs_read_all(engine: Engine) -> Any:
    """A request for prompt logprobs reads the prompt again; others still hit."""
    engine.forget()
    prompt = tokens(150, 12)
    first, _ = _asked(engine, prompt)
    said, cached = _asked(engine, prompt, more={"prompt_logprobs": 1})
    assert (said, cached) == (first, 0)
    said, cached = _asked(engine, prompt)
    assert cached > 0
    return [said, cached]


@like(IN_ENGINE, UTILS, "test_free_kv_cache_block_queue_*")
@like(IN_ENGINE, "tests/v1/core/test_block_pool.py", "free count")
def no_block_is_lost(engine: Engine) -> Any:
    """After sixty requests, a third aborted, every block is in the free queue once."""
    asks = [
        Ask(f"r{n}", tokens(30 + 7 * n, n), 3 + n % 9, n, n + 4 if n % 3 == 0 else None)
        for n in range(60)
    ]
    run = engine.run(*asks)
    assert {f"r{n}" for n in range(60) if n % 3} <= {*run.ended}
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    assert sorted(free) == [*range(1, POOL)]
    assert engine.pool.get_usage() == 0
    return run.facts()
