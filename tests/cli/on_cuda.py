"""Prints, as JSON, how vLLM's parser reads command lines where its platform is CUDA.

    python -m tests.cli.on_cuda '[["ours", ["MODEL", ...]], ["vllm", ["MODEL", ...]]]'

What comes first says who reads the words: `vllm-kvcompress serve`, or `vllm serve`. A process of
its own: vLLM and much that it imports remember which platform they found.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

import torch
from vllm import platforms

from vllm_kvcompress.cli import launch, serve


def parsed(reader: str, words: list[str]) -> dict[str, Any]:
    """Returns the options of `vllm serve`, with every default."""
    command = ["serve", *words]
    if reader == "ours":
        command = launch.vllm_command(serve.parse_request(words))
    return vars(launch.parse(command)[1])


def main() -> None:
    """Parses command lines with vLLM's platform replaced by CUDA's."""
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("stand-in")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    platforms._current_platform = importlib.import_module(
        "vllm.platforms.cuda"
    ).NonNvmlCudaPlatform()
    launch.current_platform = platforms._current_platform
    print(json.dumps([parsed(*each) for each in json.loads(sys.argv[1])], default=str))


if __name__ == "__main__":
    main()
