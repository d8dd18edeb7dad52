"""`vllm-kvcompress profile`: measures a model's heads for policies that need it once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vllm_kvcompress.cli.eval import add_engine_option
from vllm_kvcompress.config.auto import AUTO, MEASURED_HEADS
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.files import check_writable, named

KINDS = ("headkv", "duoattention", "triattention")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face name or directory")
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON (headkv), TSV (duoattention, with a config.json beside it) or the statistics of "
        "queries that torch loads (triattention, of texts that come with Python); headkv's default "
        f"with a MODEL directory: {MEASURED_HEADS} in it, where auto finds it",
    )
    parser.add_argument("--length", type=int, default=768, help="tokens of a prompt (768)")
    parser.add_argument("--samples", type=int, default=8, help="number of prompts (8)")
    parser.add_argument("--seed", type=int, default=0, help="prompt seed (0)")
    add_engine_option(parser)
    duo = parser.add_argument_group("duoattention only")
    duo.add_argument("--sink-size", type=int, default=128, help="first tokens kept (128)")
    duo.add_argument("--recent-size", type=int, default=256, help="last tokens kept (256)")
    duo.add_argument("--sparsity", type=float, help="share of heads whose gate is written as 0")


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes a profile."""
    from vllm_kvcompress.policies.triattention import write_statistics
    from vllm_kvcompress.tools import profiler

    arguments.out = arguments.out or _beside_the_model(arguments)
    _check(arguments)
    check_writable(arguments.out)
    # The engine is this process, and is to say little.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    length, seed = arguments.length, arguments.seed
    prompts = {"num_samples": arguments.samples, "length": length, "seed": seed}
    if arguments.kind == "triattention":
        statistics = profiler.measure_queries(arguments.model, prompts, dict(arguments.engine))
        write_statistics(arguments.out, statistics)
        return _told(arguments, *statistics.shape[:2])
    scores, num_kv_heads = profiler.measure_model(arguments.model, prompts, dict(arguments.engine))
    if arguments.kind == "headkv":
        profiler.write_headkv(arguments.out, scores)
    else:
        sizes = profiler.StreamingSizes(
            arguments.sink_size, arguments.recent_size, arguments.sparsity
        )
        profiler.write_duoattention(arguments.out, scores, num_kv_heads, sizes)
    return _told(arguments, len(scores), len(scores[0]))


def _told(arguments: argparse.Namespace, num_layers: int, num_heads: int) -> int:
    """Prints what was measured, and how to use it."""
    policy = AUTO if arguments.kind == "headkv" else arguments.kind
    print(
        f"{arguments.out}: {num_layers} layers of {num_heads} query heads; serve with "
        f"--kv-policy {policy} --kv-profile {arguments.out}"
    )
    return 0


def _beside_the_model(arguments: argparse.Namespace) -> Path:
    """The place of a profile without --out: in the model's directory."""
    folder = Path(arguments.model)
    if arguments.kind != "headkv" or not folder.is_dir():
        raise ConfigError(
            f"profile {arguments.model} --kind {arguments.kind}: expected --out FILE; only for "
            "headkv and a model's directory there is a default."
        )
    return folder / MEASURED_HEADS


def _check(arguments: argparse.Namespace) -> None:
    from vllm_kvcompress.compression.needles import MIN_LENGTH

    name = arguments.model
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise ConfigError(f"{name}: expected a model's directory, found none there.")
    if arguments.length < MIN_LENGTH:
        raise ConfigError(
            f"--length {arguments.length}: expected at least {MIN_LENGTH} tokens, so that there is "
            "noise around the needle."
        )
    if arguments.samples < 1:
        raise ConfigError(f"--samples {arguments.samples}: expected at least 1.")
    if min(arguments.sink_size, arguments.recent_size) < 0:
        raise ConfigError(
            f"--sink-size {arguments.sink_size} --recent-size {arguments.recent_size}: expected "
            "numbers of tokens, at least 0."
        )
    if arguments.sparsity is not None and not 0 <= arguments.sparsity <= 1:
        raise ConfigError(f"--sparsity {arguments.sparsity}: expected a share from 0 to 1.")
    with named(arguments.out):
        is_folder = arguments.out.is_dir()
    if is_folder:
        raise ConfigError(f"--out {arguments.out}: expected a file, found a directory.")
