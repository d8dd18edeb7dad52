"""`vllm-kvcompress profile`: measures a model's heads for auto, headkv and duoattention."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_kvcompress.config import AUTO
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.files import check_writable, named
from vllm_kvcompress.tools.model_folder import MEASURED_HEADS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face name or directory")
    parser.add_argument("--kind", required=True, choices=("headkv", "duoattention"))
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON (headkv) or TSV (duoattention, with a config.json beside it); headkv's default "
        f"with a MODEL directory: {MEASURED_HEADS} in it, where auto finds it",
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--samples", type=int, default=16, help="number of prompts (16)")
    parser.add_argument("--seed", type=int, default=0, help="prompt seed (0)")
    duo = parser.add_argument_group("duoattention only")
    duo.add_argument("--sink-size", type=int, default=128, help="first tokens kept (128)")
    duo.add_argument("--recent-size", type=int, default=256, help="last tokens kept (256)")
    duo.add_argument("--sparsity", type=float, help="share of heads whose gate is written as 0")


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes a profile."""
    from tqdm import tqdm

    from vllm_kvcompress.tools import profiler

    arguments.out = arguments.out or _beside_the_model(arguments)
    _check(arguments)
    check_writable(arguments.out)
    model, tokenizer = _load(arguments.model)
    settings = profiler.ProfileSettings(arguments.samples, arguments.length, arguments.seed)
    scores = profiler.measure_heads(
        model, tokenizer, settings, lambda samples: tqdm(samples, unit="prompt", desc="measuring")
    )
    if arguments.kind == "headkv":
        profiler.write_headkv(arguments.out, scores)
    else:
        config = model.config.get_text_config()
        sizes = profiler.StreamingSizes(
            arguments.sink_size, arguments.recent_size, arguments.sparsity
        )
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        profiler.write_duoattention(arguments.out, scores, num_kv_heads, sizes)
    policy = AUTO if arguments.kind == "headkv" else arguments.kind
    print(
        f"{arguments.out}: {len(scores)} layers of {len(scores[0])} query heads; serve with "
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


def _load(name: str) -> tuple[Any, Any]:
    """Loads the model with eager attention, on the GPU if there is one, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer

    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise ConfigError(f"{name}: expected a model's directory, found none there.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, attn_implementation="eager", dtype="auto"
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name}: cannot be loaded as a causal language model: {reason}"
        ) from None
    return model.to(device).eval(), load_tokenizer(name)
