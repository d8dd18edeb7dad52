"""The stand-in for an accelerator refuses whatever would synchronise with a real one."""

import numpy as np
import pytest
import torch

from tests.accelerator import ACCELERATOR, Synchronised, watched
from vllm_kvcompress.kernels.common.transfers import Download, upload

WAITS = {
    "number": lambda t: int(t.sum()),
    "condition": lambda t: bool((t == 0).all()),
    "list": lambda t: t.tolist(),
    "host": lambda t: t.cpu(),
    "mask": lambda t: t[t > 0],
    "places": lambda t: t.nonzero(),
    "repeats": lambda t: torch.repeat_interleave(t[0].long()),
    "devices": lambda t: t + torch.ones(4, 8),
    "index": lambda t: t[torch.tensor([0, 1])],
    "indexed write": lambda t: t.__setitem__(torch.tensor([0, 1]), 0),
    "literal": lambda t: torch.tensor([1, 2], device=t.device),
    "copy": lambda t: torch.tensor([1, 2]).to(t.device),
}


@pytest.mark.parametrize("what", WAITS)
def test_synchronisation_is_refused(what: str) -> None:
    numbers = torch.zeros(4, 8, device=ACCELERATOR)
    with watched(), pytest.raises((Synchronised, RuntimeError, NotImplementedError)):
        WAITS[what](numbers)


def test_asynchronous_work_passes() -> None:
    numbers = torch.zeros(4, 8, device=ACCELERATOR)
    with watched():
        index = upload([0, 2], ACCELERATOR)
        numbers[index] = 1
        assert numbers[index].sum(dim=1).shape == (2,)
        assert upload(np.arange(3), ACCELERATOR).device == ACCELERATOR


def test_uploading_to_the_host_copies_nothing() -> None:
    numbers = np.arange(3)
    numbers_there = upload(numbers, torch.device("cpu"))
    numbers[0] = 7
    assert numbers_there.tolist() == [7, 1, 2]


def test_downloads_do_not_synchronise() -> None:
    numbers = torch.zeros(4, device=ACCELERATOR)
    with watched():
        assert Download(numbers.max()).value is None
    assert Download(torch.tensor([3, 9]).max()).value == 9
