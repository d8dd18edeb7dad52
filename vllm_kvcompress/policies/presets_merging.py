"""Policies and modifiers that put something in the place of what is evicted."""

from __future__ import annotations

from dataclasses import replace

from vllm_kvcompress.policies.allocate import Ada, Uniform
from vllm_kvcompress.policies.merge import CacheMerging, SimilarKeys
from vllm_kvcompress.policies.moments import MomentResiduals, Moments
from vllm_kvcompress.policies.parameters import Parameter
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.presets import (
    ADA_PARAMETERS,
    POLICIES,
    WINDOW,
    PolicyInfo,
    Values,
    add_modifier,
    add_policy,
)
from vllm_kvcompress.policies.profiles import HeadProfile
from vllm_kvcompress.policies.protect import Protection
from vllm_kvcompress.policies.select import TopScores
from vllm_kvcompress.policies.window import WindowMass

MERGERS = ("cam", "d2o", "momentkv", "momentfix")
MOMENTKV_PAPER = (
    "MomentKV: Closing the Directional Gap in KV Cache Eviction for Long-Context Inference, "
    "arXiv 2606.01563"
)
EVICTING = tuple(POLICIES)


def _d2o(values: Values, profile: HeadProfile | None) -> Pipeline:
    return Pipeline(
        "",
        WindowMass(values["window_size"], kernel_size=1),
        Uniform(),
        TopScores(),
        Protection(num_sinks=values["num_sinks"], recent_fraction=values["recent_fraction"]),
        merger=SimilarKeys(values["skip_layers"]),
    )


def _momentkv(values: Values, profile: HeadProfile | None) -> Pipeline:
    protection = Protection(num_sinks=values["num_sinks"], num_recent=values["window_size"])
    return Pipeline(
        "",
        WindowMass(values["window_size"], kernel_size=1),
        Ada(values["safeguard"], values["safeguard_mode"], protection),
        MomentResiduals(values["chunk_size"]),
        protection,
        merger=Moments(),
    )


def _cam(base: Pipeline, values: Values) -> Pipeline:
    merger = CacheMerging(values["num_targets"], values["merge_window"], values["draw"])
    return replace(base, merger=merger)


def _momentfix(base: Pipeline, values: Values) -> Pipeline:
    return replace(base, merger=Moments())


add_policy(
    _d2o,
    PolicyInfo(
        "d2o",
        "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large "
        "Language Models, arXiv 2406.13035",
        "H2O, and what it evicts is merged into the kept token of the most similar key.",
        {
            "score": "attention accumulated over the last window_size queries",
            "protect": "the first num_sinks tokens and recent_fraction of the budget",
            "allocate": "the same for every layer and head",
            "select": "highest score",
            "merge": "keys and values of evicted tokens that are similar enough, by cosine",
        },
        (
            Parameter("window_size", 256, "last queries whose attention is accumulated", minimum=1),
            Parameter("num_sinks", 4, "first tokens kept", minimum=0),
            Parameter("recent_fraction", 0.5, "part of the budget for recent tokens", 0.0, 1.0),
            Parameter("skip_layers", 2, "first layers, where nothing is merged", minimum=0),
        ),
    ),
)
add_policy(
    _momentkv,
    PolicyInfo(
        "momentkv",
        MOMENTKV_PAPER,
        "AdaKV's budgets; keeps what the moments of evicted tokens do not foretell, and corrects "
        "attention with these moments.",
        {
            "score": "mean attention of the last window_size queries",
            "protect": "the first num_sinks and the last window_size tokens",
            "allocate": "by each head's share of the layer's highest scores",
            "select": "highest score times the residual of the value, by chunks",
            "merge": "evicted keys and values go into moments, kept in the request's own blocks",
            "correct": "every later attention output, from the moments",
        },
        (
            WINDOW,
            Parameter("num_sinks", 1, "first tokens kept", minimum=0),
            Parameter("chunk_size", 4, "neighbours that share a score", minimum=1),
            *ADA_PARAMETERS,
        ),
    ),
)
add_modifier(
    _cam,
    PolicyInfo(
        "cam",
        "CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024",
        "Evicted values are added, with some probability, to the next kept ones.",
        {"merge": "values of evicted tokens, spread over the next num_targets kept ones"},
        (
            Parameter("num_targets", 32, "kept tokens that share an evicted value", minimum=1),
            Parameter("merge_window", 256, "last queries whose attention is averaged", minimum=1),
            Parameter(
                "draw",
                "random",
                "random (with probability p) or expected (weighted by p)",
                choices=("random", "expected"),
            ),
        ),
        modifies=("streamingllm", "h2o"),
    ),
)
add_modifier(
    _momentfix,
    PolicyInfo(
        "momentfix",
        MOMENTKV_PAPER,
        "Corrects attention with the moments of what another policy evicts.",
        {
            "merge": "evicted keys and values go into moments, kept in the request's own blocks",
            "correct": "every later attention output, from the moments",
        },
        modifies=EVICTING,
    ),
)
