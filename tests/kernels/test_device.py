"""What interpreted tests cannot show: that kernels compile for the GPU at hand and run there."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.backends import Device, assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.attention import decode_attention
from vllm_kvcompress.kernels.dispatch import twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: kernels ran in the interpreter only"
    ),
]


def test_pages_on_a_gpu_take_triton() -> None:
    entries = make_entries([100, 0, 7], dtype=torch.bfloat16)
    queries = random(3, 4, 64, dtype=torch.bfloat16)
    device = Device(torch.bfloat16)
    expected, _ = device.twin(twin(decode_attention), entries, queries, 0.1)
    outputs, _ = device.twin(decode_attention, entries, queries, 0.1)
    assert_close(outputs, expected, torch.bfloat16)


def test_addresses_beyond_32_bits() -> None:
    launch = "tests.kernels.launches.decode_far_and_near"
    far, near = Device(torch.float16).call(launch, torch.float16, "cuda")
    assert torch.equal(far, near)
