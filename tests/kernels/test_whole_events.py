"""Events as a GPU runs them, every kernel Triton's, leave what they leave on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.event_cases import BLOCK_SIZE, GROUP
from tests.kernels.child import Child
from tests.kernels.events import leave
from tests.policies.cases import Shape

SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
ANY_EVENT = {"top_entries", "apportion", "append_pages"}
# With each its kernels; together all that events use.
CASES: list[tuple[str, dict[str, object], set[str]]] = [
    ("streamingllm", {}, {"compact_pages"}),
    ("h2o+adakv", {}, {"window_mass", "compact_pages"}),
    ("adakv+criticalkv", {"norm": "l1"}, {"window_mass", "value_norms_l1", "compact_pages"}),
    ("momentkv", {}, {"window_mass", "compact_pages"}),
    ("snapkv+obcache", {}, {"compact_pages"}),
    ("d2o", {}, {"window_mass", "nearest_keys", "compact_pages"}),
    ("kvmerger", {}, {"window_mass"}),
]


@pytest.mark.parametrize(("policy", "params", "kernels"), CASES, ids=[case[0] for case in CASES])
def test_events_leave_what_they_leave_on_a_cpu(
    policy: str,
    params: dict[str, object],
    kernels: set[str],
    tmp_path: Path,
    interpreter: Child,
) -> None:
    expected, none = leave(policy, params, SHAPE, tmp_path, triton=False)
    results, taken = interpreter.call(
        "tests.kernels.events.leave", policy, params, SHAPE, tmp_path, triton=True
    )
    assert not none
    assert kernels <= taken <= kernels | ANY_EVENT
    for event, other in zip(expected, results, strict=True):
        for layer, same in zip(event, other, strict=True):
            assert torch.equal(same["counts"], layer["counts"])
            assert torch.equal(same["pages"], layer["pages"])
            for name in ("keys", "values", "carried"):
                torch.testing.assert_close(same[name], layer[name], rtol=1e-4, atol=1e-5)
