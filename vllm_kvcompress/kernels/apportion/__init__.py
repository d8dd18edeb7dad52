"""Whole pages divided among heads by shares."""

from vllm_kvcompress.kernels.apportion import reference
from vllm_kvcompress.kernels.dispatch import by_device

apportion = by_device(reference.apportion, "apportion.apportion_triton")
