"""The plan for half an hour on a GPU: commands, what they need and what they show."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

# All of them quick, since parts of one report are.
CHECK = "python scripts/gpu_check.py --quick --out results"
ENGINE = "--prompt 4096"
FEW_GRAPHS = "--engine compilation_config='{\"cudagraph_capture_sizes\": [1, 2, 4, 8, 16, 32]}'"
VLLM = "vLLM for CUDA; no model, since weights are random"


@dataclass(frozen=True)
class Step:
    """One command of the plan.

    Attributes:
        command: as it is typed in this repository.
        minutes: after which it is over; calls on a lent machine end after ten.
        needs: what has to be there.
        tells: what is known afterwards.
    """

    command: str
    minutes: int
    needs: str
    tells: str


PLAN = (
    Step(
        f"{CHECK} --checked --layers 2 {FEW_GRAPHS} {ENGINE} --part engine --engines compressed "
        "--kv-trigger prompt,decode:64 --output 160 --limit 170",
        3,
        VLLM,
        "with two layers, which start soon, whether the engine starts with CUDA graphs of whole "
        "steps, and serves without waiting for the GPU (VLLM_GPU_SYNC_CHECK=error) or compiling "
        "(--jit-monitor-mode error), with events behind prompts and, by `decode:64`, between "
        "replayed steps. If not, stop here and mend it",
    ),
    Step(
        f"{CHECK} --part capture tests --limit 230",
        4,
        "torch, triton, pytest and pytest-xdist; no vLLM",
        "whether captured decode steps compute, when they are replayed, what they are to, and "
        "whether kernels do on this GPU what they do on a CPU. If not, stop here and mend it",
    ),
    Step(
        f"{CHECK} {ENGINE} --part engine decode-only --engines compressed stock off --profile "
        "--limit 530",
        9,
        VLLM,
        "ms per step when all requests generate, against stock vLLM at 1, 8 and 64 requests; "
        "tokens/s, time to the first token and memory under load; where the GPU's time goes; what "
        "our classes cost when they compress nobody",
    ),
    Step(
        f"{CHECK} {ENGINE} --part engine --engines compressed stock --pool 4 --requests 32 "
        "--output 128 --limit 290",
        5,
        VLLM,
        "requests/s against stock vLLM when memory is short",
    ),
    Step(
        f"{CHECK} --part events --limit 110",
        2,
        "torch, triton and numpy; no vLLM",
        "from which prompt length on the prefill hides what the host does for an event",
    ),
    Step(
        "vllm-kvcompress eval models/smollm2 --tasks ruler/niah_single_2,ruler/vt,text "
        "--lengths 2048 --samples 10 --policies adakv --budgets 0.25 --concurrency 64 "
        "--out results/eval",
        2,
        "vLLM for CUDA, and models/smollm2 (vllm-kvcompress fetch-model smollm2)",
        "quality of RULER and text on a real model, to be compared with docs/results/spans.md; "
        "goes on where it was stopped",
    ),
    Step(
        f"vllm-kvcompress bench --scenario all --repeats 1 --out results/bench {FEW_GRAPHS}",
        5,
        "vLLM for CUDA; no model",
        "all loads against stock vLLM, on a small shape, with few graphs so that engines start "
        "sooner; goes on where it was stopped",
    ),
)


def as_text() -> str:
    """Returns the plan as a shell script, whose commands also run one by one."""
    minutes = sum(step.minutes for step in PLAN)
    lines = [
        f"# {minutes} minutes on a GPU. Results and goals: results/gpu-*.md, after each command."
    ]
    for number, step in enumerate(PLAN, start=1):
        said = f"{number}. {step.minutes} min. Needs {step.needs}. Tells {step.tells}."
        lines += ["", *(f"# {line}" for line in textwrap.wrap(said, 96)), step.command]
    return "\n".join(lines)
