"""scripts/measure/event_counts.py: what is counted on torch's `meta` device."""

from __future__ import annotations

import event_counts


def test_layers_that_run_at_once_queue_fewer_operators() -> None:
    alone, at_once, several = (
        event_counts.count_operators("snapkv", way, number, 256)
        for way, number in (("alone", 1), ("at_once", 1), ("together", 2))
    )
    assert 36 * 30 < alone < 36 * 100
    assert at_once < several < alone / 2


def test_an_event_holds_at_least_a_copy_of_what_it_writes_in_place() -> None:
    num_tokens, row_bytes = 4096, 2 * 8 * 128 * 2
    few, many = (event_counts.peak_bytes("snapkv", num_tokens * n) for n in (1, 2))
    assert num_tokens * row_bytes / 2 <= few < many < 2 * num_tokens * row_bytes


def test_arithmetic_is_that_of_the_shapes() -> None:
    num_tokens = 1000
    linear = 2 * num_tokens * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    causal = sum(2 * 2 * 32 * 128 * (i + 1) for i in range(num_tokens))
    assert abs(event_counts.prefill(num_tokens) / (linear + causal) - 1) < 0.001
    window = event_counts.arithmetic(num_tokens)["window of 32 queries, logits twice"]
    assert window == sum(2 * (2 * 128) for _ in range(32 * 32) for _ in range(num_tokens))
