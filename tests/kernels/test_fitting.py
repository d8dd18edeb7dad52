"""Programs that a GPU has no room for give way to smaller ones, which compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import triton

from tests.accelerator import twin_of
from tests.kernels.backends import assert_close
from tests.kernels.child import Child
from tests.kernels.compiled_cases import launches
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.kernels.common import launch_triton
from vllm_kvcompress.kernels.common.launch_triton import launch_fitting

SMALL = {launch.name: launch for launch in launches(24, 16, torch.float32, num_queries=20)}
LIKE = torch.zeros(2, 64)


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # lets tensors on the CPU pass
    launch_triton.fitting_rows.clear()
    yield
    launch_triton.fitting_rows.clear()


def launcher(most: int, launched: list[int]) -> Callable[[int], None]:
    """Launches programs of up to `most` rows, and notes all that were tried."""

    def launch(rows: int) -> None:
        launched.append(rows)
        if rows > most:
            raise triton.OutOfResources(rows * 1024, most * 1024, "shared memory")

    return launch


def test_what_fits_is_launched_as_it_is() -> None:
    launched: list[int] = []
    launch_fitting("k", 128, LIKE, launcher(128, launched))
    assert launched == [128]


def test_rows_are_halved_once() -> None:
    """Later launches begin with what fitted, those of another kernel or size with all rows."""
    launched: list[int] = []
    launch_fitting("k", 128, LIKE, launcher(32, launched))
    launch_fitting("k", 128, LIKE, launcher(32, launched))
    assert launched == [128, 64, 32, 32]
    for name, rows, like in (("l", 128, LIKE), ("k", 64, LIKE), ("k", 128, LIKE.half())):
        launched.clear()
        launch_fitting(name, rows, like, launcher(128, launched))
        assert launched == [rows]


def test_a_gpu_without_room_for_the_fewest_rows_is_refused() -> None:
    launched: list[int] = []
    with pytest.raises(UnsupportedError, match=r"16384 of shared memory.*with 8192; serve in bf16"):
        launch_fitting("k", 64, LIKE, launcher(8, launched))
    assert launched == [64, 32, 16]


@pytest.mark.parametrize(
    "name",
    [
        *("prefill_attention", "correct_with_moments", "window_mass"),
        *("value_norms_l1", "value_norms_l2", "nearest_keys"),
    ],
)
def test_smaller_programs_compute_the_same(name: str, interpreter: Child) -> None:
    launch = SMALL[name]
    calls = "tests.kernels.launches.with_fewest_rows"
    results, num_launches = interpreter.call(calls, launch.launcher, *launch.args)
    assert num_launches == (2 if name.startswith("window") else 1)
    module, _, launcher_name = launch.launcher.rpartition(".")
    twin = twin_of(module.removeprefix("vllm_kvcompress.kernels."), launcher_name)
    expected = twin(*launch.args)
    if expected is None:
        expected, results = launch.args[1], results[1]
    for one, other in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert_close(one, other, torch.float32)


def as_tuple(value: object) -> tuple[torch.Tensor, ...]:
    """A tuple of one tensor or several."""
    return value if isinstance(value, tuple) else (value,)  # type: ignore[return-value]
