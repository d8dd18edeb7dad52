"""Finds out how far the heads of the loaded model look back, for policies that divide by it.

Heads come from the model's folder, or from an earlier start (a file in the user's cache folder), or
are measured before the engine serves: it reads prompts whose words return (`compression.needles`),
as it reads those of users, with the weights as they were loaded. All ranks take part.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm import envs
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

from vllm_kvcompress.compression.needles import (
    MIN_LENGTH,
    NEEDLE_WORDS,
    NeedleAttention,
    needle_prompt,
)
from vllm_kvcompress.compression.query_means import QueryMeans
from vllm_kvcompress.compression.repetitions import Repetitions
from vllm_kvcompress.config.auto import profile_beside
from vllm_kvcompress.errors import ConfigError, UnsupportedError
from vllm_kvcompress.policies.headkv import (
    Scores,
    headkv_text,
    mean_importance,
    read_importance,
)
from vllm_kvcompress.policies.parts.profiles import Table
from vllm_kvcompress.vllm_plugin.compat.config import vocabulary
from vllm_kvcompress.vllm_plugin.compat.worker import read_prompt, tokens_in_pool
from vllm_kvcompress.vllm_plugin.worker_side.ranks import layers_around, of_all_ranks

logger = init_logger(f"vllm.plugins.{__name__}")
REVISION = 1  # of the prompts and the scores; files of other revisions are not read
# Where heads come from.
FILE, FOLDER, CACHE = "file", "model folder", "cache"
MEASURED, NONE = "measured now", "none"
_REQUEST = "_kvcompress_heads"
_HEAD_NUMBERS = 64  # of every weight, which tell models of one shape apart


@dataclass(frozen=True)
class HeadPrompts:
    """Prompts that measure heads: their number, tokens of each, and seed."""

    num_samples: int = 8
    length: int = 768
    seed: int = 0


def provide_heads(worker: Any) -> None:
    """Gives a worker's policies the measured heads that they lack; every rank must call it."""
    compression = worker.compression
    if compression is None:
        return
    if profile := compression.settings.profile:
        is_beside = profile == profile_beside(worker.vllm_config.model_config.model)
        compression.heads_from = FOLDER if is_beside else FILE
    if not compression.lacks_heads:
        return
    is_first = get_world_group().is_first_rank
    if reason := reason_against(worker):
        if is_first:
            logger.warning("Heads are not measured, so all get the same budget: %s.", reason)
        return
    path, shape = cached_file(worker), _shape(worker)
    known = _known_heads(worker, path, shape) if is_first else None
    known = get_world_group().broadcast_object(known)
    if known is None:
        scores = measure(worker, HeadPrompts())
        known = mean_importance(scores), MEASURED
        if is_first:
            _keep(path, headkv_text(scores))
    compression.use_heads(*known)
    if is_first:
        logger.info("Budgets follow measured heads (from: %s).", known[1])


def reason_against(worker: Any) -> str:
    """Returns why heads cannot be measured; empty: they can."""
    if worker.vllm_config.load_config.load_format == "dummy":
        return "weights are random (--load-format dummy)"
    if len(worker.compression.groups) > 1:
        return "the full-attention layers lie in cache groups that cannot share blocks"
    if any(group.sharing for group in worker.compression.groups.values()):
        return "layers read the caches of others, so a KV head has query heads in several layers"
    if _length(worker, MIN_LENGTH) < MIN_LENGTH:
        return f"no request can be as long as {MIN_LENGTH} tokens"
    return ""


def measure(worker: Any, prompts: HeadPrompts) -> Scores:
    """Reads prompts, and returns the scores of all ranks' query heads, by layer and prompt.

    Raises:
        UnsupportedError: prompts are too short, too long for this engine, or it knows few words.
    """
    length = _length(worker, prompts.length)
    words, start = vocabulary(worker.vllm_config.model_config)
    if length < MIN_LENGTH or len(words) < 2 * NEEDLE_WORDS:
        raise UnsupportedError(
            f"measuring heads takes prompts of at least {MIN_LENGTH} tokens and a vocabulary of at "
            f"least {2 * NEEDLE_WORDS} ordinary ones, found {length} and {len(words)}; serve with "
            "--no-kv-measure-heads."
        )
    (group,) = worker.compression.groups.values()
    needles = NeedleAttention(group.tables.pool, group.runner.sinks, group.softcap)
    columns, began = [], time.monotonic()
    seeds = range(prompts.seed * 1_000_003, prompts.seed * 1_000_003 + prompts.num_samples)
    is_first = get_world_group().is_first_rank
    for seed in tqdm(seeds, desc="Measuring heads", unit="prompt", disable=not is_first):
        prompt = needle_prompt(words, start, length, seed)
        needles.watch(_REQUEST, prompt)
        _read(worker, prompt.tokens[:-1], needles)
        masses = [needles.masses[layer] for layer in range(len(group.layer_index))]
        columns.append(torch.stack(masses).cpu())
    scores: Scores = of_all_ranks(torch.stack(columns, dim=2)).tolist()
    if is_first:
        logger.info(
            "Measured %d heads of %d layers with %d prompts of %d tokens in %.1f s.",
            *(len(scores[0]), len(scores), prompts.num_samples, length, time.monotonic() - began),
        )
    return scores


def measure_queries(worker: Any, texts: Sequence[list[int]]) -> torch.Tensor:
    """Reads texts, and returns the statistics of all ranks' query heads (TriAttention).

    They are [layers, query heads, 3, D/2] fp32, as `QueryMeans.statistics` has them. The worker's
    policy has to ask for the rotation of queries.
    """
    (group,) = worker.compression.groups.values()
    means = QueryMeans(group.tables.pool, group.runner.weights)
    hidden = not get_world_group().is_first_rank
    for text in tqdm(texts, desc="Measuring queries", unit="text", disable=hidden):
        means.watch(_REQUEST)
        _read(worker, text, means)
    return of_all_ranks(means.statistics())


def _read(worker: Any, tokens: list[int], observer: Repetitions) -> None:
    """Reads a prompt while another object than the serving one observes its queries."""
    (group,) = worker.compression.groups.values()
    serving, group.runner.repetitions = group.runner.repetitions, observer
    try:
        read_prompt(worker, _REQUEST, tokens)
    finally:
        group.runner.repetitions = serving


def _length(worker: Any, wanted: int) -> int:
    """Returns the length of prompts that this engine reads in one step, at most `wanted`."""
    config = worker.vllm_config
    most = min(wanted, config.model_config.max_model_len)
    most = min(most, 1 + config.scheduler_config.max_num_batched_tokens)
    return tokens_in_pool(worker.model_runner, most)


def _shape(worker: Any) -> tuple[int, int]:
    """Returns the numbers of layers, and of query heads on all ranks; every rank must call it."""
    (group,) = worker.compression.groups.values()
    num_ranks = worker.vllm_config.parallel_config.tensor_parallel_size
    num_layers = len(group.layer_index) + sum(layers_around(len(group.layer_index)))
    return num_layers, worker.compression.num_query_heads * num_ranks


def cached_file(worker: Any) -> Path:
    """Returns where this model's heads are kept from start to start, in vLLM's cache folder.

    The name is a digest of the names, shapes, types and first numbers of the weights, on the first
    rank, and of what is measured.
    """
    prompts = replace(HeadPrompts(), length=_length(worker, HeadPrompts.length))
    digest = hashlib.sha256(repr((REVISION, prompts, _shape(worker))).encode())
    for name, weight in worker.model_runner.model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
        if weight.numel():
            numbers = weight.data[(0,) * (weight.dim() - 1)].flatten()[:_HEAD_NUMBERS]
            digest.update(numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return Path(envs.VLLM_CACHE_ROOT) / "kvcompress" / "heads" / f"{digest.hexdigest()}.json"


def _known_heads(worker: Any, path: Path, expected: tuple[int, int]) -> tuple[Table, str] | None:
    """Returns the heads of the model's folder or of an earlier start; None: there are none."""
    beside = profile_beside(worker.vllm_config.model_config.model)
    if beside is not None:
        return read_importance(Path(beside)), FOLDER
    if not path.is_file():
        return None
    try:
        table = read_importance(path)
        shape = len(table), len(table[0])
        if shape != expected:
            raise ConfigError(f"{path}: expected layers and heads {expected}, found {shape}.")
    except ConfigError as error:
        logger.warning("Heads of an earlier start cannot be read, so they are measured: %s", error)
        return None
    return table, CACHE


def _keep(path: Path, text: str) -> None:
    """Writes a file whole or not at all; a folder that cannot be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("Measured heads cannot be kept, so each start measures them: %s", error)
