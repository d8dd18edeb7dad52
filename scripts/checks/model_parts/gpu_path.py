"""Runs a tiny model on the path for GPUs, which this process takes on a CPU as tests/gpu_path do.

    python -m model_parts.gpu_path KIND MODEL REPORT LOG [OPTION ...]

Arguments are those of `engines.run`. Model runner V2 runs in Triton's interpreter, attention in
plain torch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from model_parts import engines
from tests.gpu_path import host  # before vLLM, since it has Triton interpreted
from tests.gpu_path.stand_ins import replace_device, taken_for_cuda

STOCK = ["--worker-cls=vllm.v1.worker.gpu_worker.Worker"]
STOCK_MLA = "--attention-backend=TRITON_MLA"


def main() -> None:
    """Runs what the command line says, and writes the report."""
    kind, model, report, log, *options = sys.argv[1:]
    config = json.loads(Path(model, "config.json").read_text())
    if kind == "stock":
        options += [*STOCK, *([STOCK_MLA] if "kv_lora_rank" in config else [])]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    host.answer_for_vllm()
    host.interpreter.speed_up()
    if takes_flash := config["architectures"][0].startswith("Inkling"):
        options.append("--num-gpu-blocks-override=1000")  # convolutions take blocks of 4 tokens
    backend, replace_kernels = host.REPLACED["flash3" if takes_flash else "torch"]
    replace_device(backend)
    replace_kernels()
    engines.run(kind, model, options, report, log, taken_for_cuda())


if __name__ == "__main__":
    main()
