"""Measures a model's heads for files, and writes those in the formats of the methods' authors.

`policies/headkv.py`, `policies/duoattention.py` and `policies/triattention.py` read them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies.headkv import Scores, headkv_text
from vllm_kvcompress.tools.evaluation import texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer
from vllm_kvcompress.tools.files import write_whole


def measure_model(
    model: str, prompts: dict[str, int], options: dict[str, Any]
) -> tuple[Scores, int]:
    """Returns the scores of a model's heads, and its number of KV heads.

    An engine measures them, as one that serves does when it starts.

    Args:
        model: name or directory.
        prompts: fields of `HeadPrompts`.
        options: keyword arguments of `vllm.LLM`.

    Raises:
        ConfigError: the model cannot be served, or not with prompts of that length.
    """
    from vllm_kvcompress.vllm_plugin.worker_side.measured_heads import HeadPrompts, measure

    engine = _engine(model, prompts["length"], options, "spans")  # any that needs no heads
    scores: Scores = engine.collective_rpc(measure, args=(HeadPrompts(**prompts),))[0]
    return scores, engine.llm_engine.vllm_config.model_config.get_total_num_kv_heads()


def measure_queries(model: str, prompts: dict[str, int], options: dict[str, Any]) -> Tensor:
    """Returns the statistics of a model's queries while it reads texts that come with Python.

    Arguments and errors are those of `measure_model`; the statistics those of `TriAttention`.
    """
    from vllm_kvcompress.vllm_plugin.worker_side.measured_heads import measure_queries

    length, kinds = prompts["length"], list(texts.KINDS)
    tokenizer = load_tokenizer(model)
    read = []
    for number in range(prompts["num_samples"]):
        first = prompts["seed"] + number // len(kinds)
        (piece,) = texts.pieces(kinds[number % len(kinds)], length, first, 1)
        read.append(tokenizer(piece)["input_ids"][: length - 1])  # one more is sampled
    engine = _engine(model, length, options, "expected")  # any that turns queries
    statistics: Tensor = engine.collective_rpc(measure_queries, args=(read,))[0]
    return statistics


def _engine(model: str, length: int, options: dict[str, Any], policy: str) -> Any:
    """Builds an engine that reads prompts of `length` tokens in one step."""
    from vllm_kvcompress.vllm_plugin.compat.engine import build_engine

    sizes = {"max_model_len": length, "max_num_batched_tokens": length, "max_num_seqs": 1}
    try:
        chosen = {**sizes, "enforce_eager": True, **options}
        return build_engine(model, {"policy": policy}, chosen)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{model}: cannot be served: {reason}") from None


def write_headkv(path: Path, scores: Scores) -> None:
    """Writes HeadKV's JSON: `{"layer-head": [score per prompt], ...}`."""
    write_whole(path, headkv_text(scores))


@dataclass(frozen=True)
class StreamingSizes:
    """What DuoAttention's pattern contains besides gates.

    Attributes:
        num_sinks, num_recent: first and last tokens that streaming heads keep.
        sparsity: share of the heads whose gate is written as 0, or None for none.
    """

    num_sinks: int = 128
    num_recent: int = 256
    sparsity: float | None = None


def gates_of(scores: Scores, num_kv_heads: int, sparsity: float | None) -> list[list[float]]:
    """Gates in [0, 1] by layer and KV head: mean scores relative to the highest.

    A KV head scores as the best query head that reads it.
    """
    group = len(scores[0]) // num_kv_heads
    means = [[sum(values) / len(values) for values in heads] for heads in scores]
    best = [[max(row[h * group : (h + 1) * group]) for h in range(num_kv_heads)] for row in means]
    top = max(map(max, best)) or 1.0
    gates = [[value / top for value in row] for row in best]
    places = [(la, h) for la in range(len(gates)) for h in range(num_kv_heads)]
    places.sort(key=lambda place: gates[place[0]][place[1]])
    for layer, head in places[: round((sparsity or 0.0) * len(places))]:
        gates[layer][head] = 0.0
    return gates


def write_duoattention(
    path: Path, scores: Scores, num_kv_heads: int, sizes: StreamingSizes
) -> None:
    """Writes DuoAttention's pattern: a TSV of gates and, beside it, `config.json`."""
    gates = gates_of(scores, num_kv_heads, sizes.sparsity)
    write_whole(path, "".join("\t".join(f"{gate:.6f}" for gate in row) + "\n" for row in gates))
    settings = {"sink_size": sizes.num_sinks, "recent_size": sizes.num_recent}
    write_whole(path.parent / "config.json", json.dumps(settings) + "\n")
