"""What is the same for all layers of a step is made once; no layer looks for its part of it."""

from __future__ import annotations

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

OF_HEADS = {"reshape": 1, "view": 1}  # queries and outputs, of which every layer has its own
BESIDE_OTHERS = {**OF_HEADS, "slice": 4}  # and where they are, of either kind of request
RECORDING = ("index", "index_put_")  # last queries of a prompt


def test_layers_only_look_at_their_own_queries(llama: str, run_engine: Run) -> None:
    """In steps of compressed requests alone, and beside others that decode or read a chunk; but
    for what the first layer makes for all that follow, once."""
    report = run_engine(
        llama,
        [
            [
                request("compressed", prompt(200, seed=1), 50),
                request("short", prompt(20, seed=2), 12, at_step=5),
                request("long", prompt(300, seed=3), 1, at_step=20),
            ]
        ],
        settings={"policy": "adakv", "budget": 0.25},
        max_num_batched_tokens=128,
        probes=["tests.engine.layer_views:counted"],
    )
    wanted = {"alone": OF_HEADS, "mixed": BESIDE_OTHERS, "chunkmixed": BESIDE_OTHERS}
    for kind, expected in wanted.items():
        layers = [counts for name, counts in report["layers"] if name == kind]
        looks = [{op: n for op, n in each.items() if op not in RECORDING} for each in layers]
        assert len(looks) >= 9, kind
        assert [each for each in looks[1:] if each != expected][1:] == [], kind
    steps = [counts for name, counts in report["steps"] if name == "alone"]
    quiet = min(sum(counts.values()) for counts in steps)
    assert [sum(counts.values()) for counts in steps].count(quiet) > 20
    assert all("unbind" not in counts for counts in steps if sum(counts.values()) == quiet)
