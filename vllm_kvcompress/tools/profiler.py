"""Measures a model's heads for files, and writes those in the formats of the methods' authors.

`policies/headkv.py` and `policies/duoattention.py` read them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies.headkv import Scores, headkv_text
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
    from vllm_kvcompress.vllm_plugin.startup.compat import build_engine
    from vllm_kvcompress.vllm_plugin.worker_side.measured_heads import HeadPrompts, measure

    length = prompts["length"]
    sizes = {"max_model_len": length, "max_num_batched_tokens": length, "max_num_seqs": 1}
    settings = {"policy": "spans"}  # any that needs no heads
    try:
        engine = build_engine(model, settings, {**sizes, "enforce_eager": True, **options})
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{model}: cannot be served: {reason}") from None
    scores: Scores = engine.collective_rpc(measure, args=(HeadPrompts(**prompts),))[0]
    return scores, engine.llm_engine.vllm_config.model_config.get_total_num_kv_heads()


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
