"""A process that has imported vLLM with Triton interpreted, and forks for every scenario.

    python -m tests.gpu_path.host

reads lines of JSON, [scenario, report, log, environment, kernels], and answers with an exit code.
`kernels` are those of vLLM's attention: triton, interpreted; or, in torch_kernels.py, torch in
Triton's place and flash2 or flash3 in FlashAttention's. The rest of a GPU is in stand_ins.py.

Triton decides when kernels are defined whether it interprets them, so this cannot be the process
of the other tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # torch would ask Triton for a compiler

import torch
from triton.backends import backends


class Driver:
    """The driver of no device. Nothing is asked of it, since nothing is compiled."""

    @staticmethod
    def is_active() -> bool:
        """Whether there is a device: vLLM is to believe so."""
        return True


# vLLM uses Triton only where a driver is active; on CPUs it looks for one of this name.
backends["cpu"] = SimpleNamespace(driver=Driver)

torch.cuda.get_device_capability = lambda device=None: (9, 0)  # vLLM sizes launches by it

from tests import interpreter  # noqa: E402
from tests.engine import engine_process  # noqa: E402
from tests.gpu_path.flash_attention import replace_flash_kernels  # noqa: E402
from tests.gpu_path.stand_ins import replace_device  # noqa: E402
from tests.gpu_path.torch_kernels import replace_triton_kernels  # noqa: E402
from vllm_kvcompress.vllm_plugin.compat.engine import ENGINE_MODULES  # noqa: E402
from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm  # noqa: E402
from vllm_kvcompress.vllm_plugin.worker_side.attention import base, gpu_warm_up  # noqa: E402

MODULES = (
    *ENGINE_MODULES,
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.gpu.warmup",
    "vllm.v1.attention.backends.triton_attn",
    "vllm_kvcompress.vllm_plugin.worker_side.attention.gpu_triton",
)


def warm_up_less() -> None:
    """Warms up one layer: interpreted, no kernel is compiled by where its rows begin."""
    gpu_warm_up.LAYERS = 1


TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
FLASH = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
REPLACED = {
    "triton": (TRITON, warm_up_less),
    "torch": (TRITON, replace_triton_kernels),
    "flash2": (FLASH, lambda: replace_flash_kernels(2)),
    "flash3": (FLASH, lambda: replace_flash_kernels(3)),
}

base.MIN_RUN_TOKENS = 16  # the prompts of a step here have few


def main() -> None:
    """Answers until its input ends."""
    answer_for_vllm()
    interpreter.speed_up()
    for name in MODULES:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        scenario, report, log, environment, kernels = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                backend, replace_kernels = REPLACED[kernels]
                replace_device(backend)
                replace_kernels()
                engine_process.run(scenario, report, log, environment)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
