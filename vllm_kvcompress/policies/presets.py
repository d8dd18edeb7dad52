"""The closed list of policies and modifiers: what each is made of, and what users read of it.

Here those that evict; `presets_merging` adds those that put something in the place of the evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import profiles
from vllm_kvcompress.policies.allocate import Ada, HeadTable, Pyramid, RetrievalHeads, Uniform
from vllm_kvcompress.policies.geometry import KeyDiff, KeyNorm
from vllm_kvcompress.policies.parameters import Parameter
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.position import Recency
from vllm_kvcompress.policies.profiles import HeadProfile
from vllm_kvcompress.policies.protect import NOTHING_PROTECTED, Protection
from vllm_kvcompress.policies.select import TopScores, TwoStage
from vllm_kvcompress.policies.window import AccumulatedMass, LastQueryMass, Perturbation, WindowMass

Values = Mapping[str, Any]


@dataclass(frozen=True)
class PolicyInfo:
    """What users read about a policy or modifier.

    Attributes:
        name: as written in a policy string.
        paper: title and arXiv number.
        summary: one sentence.
        stages: what it does in each stage of the pipeline.
        parameters: what can be set.
        modifies: for modifiers, the policies that they go on; empty for policies.
        profile: kind of profile file it needs, or None.
    """

    name: str
    paper: str
    summary: str
    stages: Mapping[str, str]
    parameters: tuple[Parameter, ...] = ()
    modifies: tuple[str, ...] = ()
    profile: str | None = None


WINDOW = Parameter("window_size", 32, "last queries observed, and kept", minimum=1)
KERNEL = Parameter("kernel_size", 7, "width of the pooling over neighbours; odd", minimum=1)
POOLING = Parameter("pooling", "max", "how neighbours are pooled", choices=("max", "mean"))
ACCUMULATED = Parameter(
    "window_size", 256, "last queries of an event whose attention is added up", minimum=1
)
ADA_PARAMETERS = (
    Parameter("safeguard", 0.2, "part of the budget shared out evenly", 0.0, 1.0),
    Parameter(
        "safeguard_mode",
        "blend",
        "blend (the authors' code) or floor (kvpress)",
        choices=("blend", "floor"),
    ),
)
SNAPKV_PARAMETERS = (WINDOW, KERNEL, POOLING)
SNAPKV_STAGES = {
    "score": "mean attention of the last window_size queries, pooled over neighbouring tokens",
    "protect": "the last window_size tokens",
    "allocate": "the same for every layer and head",
    "select": "highest score",
}


def _snapkv(values: Values, profile: HeadProfile | None) -> Pipeline:
    if values["kernel_size"] % 2 == 0:
        raise ConfigError(
            f"kernel_size: expected an odd number, so that pooling is centred, found "
            f"{values['kernel_size']}; use {values['kernel_size'] + 1}."
        )
    protection = Protection(num_recent=values["window_size"])
    scorer = WindowMass(values["window_size"], values["kernel_size"], values["pooling"])
    return Pipeline("", scorer, Uniform(), TopScores(), protection)


def _pyramidkv(values: Values, profile: HeadProfile | None) -> Pipeline:
    allocator = Pyramid(window_size=values["window_size"], beta=values["beta"])
    return replace(_snapkv(values, profile), allocator=allocator)


def _adakv(values: Values, profile: HeadProfile | None) -> Pipeline:
    base = _snapkv(values, profile)
    allocator = Ada(values["safeguard"], values["safeguard_mode"], base.protection)
    return replace(base, allocator=allocator)


def _headkv(values: Values, profile: HeadProfile | None) -> Pipeline:
    allocator = HeadTable(beta=values["beta"], window_size=values["window_size"])
    return replace(_snapkv(values, profile), allocator=allocator)


def _h2o(values: Values, profile: HeadProfile | None) -> Pipeline:
    protection = Protection(recent_fraction=values["recent_fraction"])
    scorer = AccumulatedMass(values["window_size"])
    return Pipeline("", scorer, Uniform(), TopScores(), protection)


def _tova(values: Values, profile: HeadProfile | None) -> Pipeline:
    return Pipeline("", LastQueryMass(), Uniform(), TopScores(), NOTHING_PROTECTED)


def _keydiff(values: Values, profile: HeadProfile | None) -> Pipeline:
    return Pipeline("", KeyDiff(values["anchor"]), Uniform(), TopScores(), NOTHING_PROTECTED)


def _knorm(values: Values, profile: HeadProfile | None) -> Pipeline:
    allocator = Uniform(skip_layers=values["skip_layers"])
    return Pipeline("", KeyNorm(), allocator, TopScores(), NOTHING_PROTECTED)


def _streamingllm(values: Values, profile: HeadProfile | None) -> Pipeline:
    protection = Protection(num_sinks=values["num_sinks"])
    return Pipeline("", Recency(), Uniform(), TopScores(), protection)


def _duoattention(values: Values, profile: HeadProfile | None) -> Pipeline:
    assert profile is not None
    protection = Protection(num_sinks=profile.num_sinks)
    allocator = RetrievalHeads(num_streaming=profile.num_sinks + profile.num_recent)
    return Pipeline("", Recency(), allocator, TopScores(), protection)


def _divided_by_scores(base: Pipeline, values: Values) -> Pipeline:
    """AdaKV's division among heads, on top of what the base gives to each layer."""
    allocator = Ada(
        values["safeguard"], values["safeguard_mode"], base.protection, layers=base.allocator
    )
    return replace(base, allocator=allocator)


def _criticalkv(base: Pipeline, values: Values) -> Pipeline:
    return replace(base, selector=TwoStage(values["alpha"], values["epsilon"], values["norm"]))


def _perturbation(base: Pipeline, values: Values) -> Pipeline:
    scorer = Perturbation(
        values["window_size"],
        values.get("kernel_size", 1),
        values.get("pooling", "max"),
        values["variant"],
    )
    return replace(base, scorer=scorer)


def _window(base: Pipeline, values: Values) -> Pipeline:
    return replace(base, protection=Protection(recent_fraction=values["recent_fraction"]))


POLICIES: dict[str, tuple[PolicyInfo, Callable[[Values, HeadProfile | None], Pipeline]]] = {}
MODIFIERS: dict[str, tuple[PolicyInfo, Callable[[Pipeline, Values], Pipeline]]] = {}


def add_policy(build: Callable[[Values, HeadProfile | None], Pipeline], info: PolicyInfo) -> None:
    """Makes a policy known."""
    POLICIES[info.name] = (info, build)


def add_modifier(build: Callable[[Pipeline, Values], Pipeline], info: PolicyInfo) -> None:
    """Makes a modifier known."""
    MODIFIERS[info.name] = (info, build)


add_policy(
    _streamingllm,
    PolicyInfo(
        "streamingllm",
        "Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453",
        "The first tokens and the most recent ones; positions stay the true ones.",
        {"score": "position", "protect": "the first num_sinks tokens", "select": "most recent"},
        (Parameter("num_sinks", 4, "first tokens kept", minimum=0),),
    ),
)
add_policy(
    _knorm,
    PolicyInfo(
        "knorm",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430",
        "Keys of low norm.",
        {
            "score": "minus the key's norm",
            "allocate": "the first skip_layers layers whole if the others keep half a uniform "
            "budget, else uniform",
            "select": "highest score",
        },
        (Parameter("skip_layers", 2, "first layers left whole where possible", minimum=0),),
    ),
)
add_policy(
    _keydiff,
    PolicyInfo(
        "keydiff",
        "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
        "Keys unlike the average key; needs no queries.",
        {"score": "minus the cosine to the anchor", "select": "highest score"},
        (
            Parameter(
                "anchor",
                "mean_normalized",
                "what keys are compared with",
                choices=("mean_normalized", "mean_raw", "median", "pairwise"),
            ),
        ),
    ),
)
add_policy(
    _tova,
    PolicyInfo(
        "tova",
        "Transformers are Multi-State RNNs, arXiv 2401.06104",
        "What the last query attends to, the same for all heads of a layer.",
        {"score": "last query's attention, mean over the layer's heads", "select": "highest score"},
    ),
)
add_policy(
    _h2o,
    PolicyInfo(
        "h2o",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048",
        "Heavy hitters, and recent tokens.",
        {
            "score": "attention accumulated over the last window_size queries of every event",
            "protect": "the most recent recent_fraction of the budget",
            "allocate": "the same for every layer and head",
            "select": "highest score",
        },
        (
            ACCUMULATED,
            Parameter("recent_fraction", 0.5, "part of the budget for recent tokens", 0.0, 1.0),
        ),
    ),
)
add_policy(
    _snapkv,
    PolicyInfo(
        "snapkv",
        "SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469",
        "What the last queries attend to.",
        SNAPKV_STAGES,
        SNAPKV_PARAMETERS,
    ),
)
add_policy(
    _pyramidkv,
    PolicyInfo(
        "pyramidkv",
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, "
        "arXiv 2406.02069",
        "SnapKV with larger budgets in the first layers.",
        {**SNAPKV_STAGES, "allocate": "falls linearly from the first layer to the last"},
        (*SNAPKV_PARAMETERS, Parameter("beta", 20.0, "steepness of the pyramid", 1.0)),
    ),
)
add_policy(
    _adakv,
    PolicyInfo(
        "adakv",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550",
        "SnapKV with budgets per head: heads that spread their attention keep more.",
        {**SNAPKV_STAGES, "allocate": "by each head's share of the layer's highest scores"},
        (*SNAPKV_PARAMETERS, *ADA_PARAMETERS),
    ),
)
add_policy(
    _headkv,
    PolicyInfo(
        "headkv",
        "Not All Heads Matter: A Head-Level KV Cache Compression Method, arXiv 2410.19258",
        "SnapKV with budgets per head from a measured table.",
        {**SNAPKV_STAGES, "allocate": "by the heads' importance in the profile"},
        (
            *SNAPKV_PARAMETERS,
            Parameter("beta", 1.01, "1/beta of every budget is pooled", 1.0),
            Parameter("temperature", 1.0, "scores are raised to this power", 0.0),
        ),
        profile=profiles.HEADKV,
    ),
)
add_policy(
    _duoattention,
    PolicyInfo(
        "duoattention",
        "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, "
        "arXiv 2410.10819",
        "Retrieval heads keep everything, the others sinks and recent tokens.",
        {
            "score": "position",
            "protect": "the pattern's first sink_size tokens",
            "allocate": "heads with the highest gates whole, as many as the budget allows",
            "select": "most recent",
        },
        profile=profiles.DUOATTENTION,
    ),
)
add_modifier(
    _divided_by_scores,
    PolicyInfo(
        "adakv",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550",
        "Budgets per head on top of another policy's scores and layers.",
        {
            "allocate": "layers as the policy has it; heads by their share of the layer's "
            "highest scores"
        },
        ADA_PARAMETERS,
        modifies=("pyramidkv", "h2o"),
    ),
)
add_modifier(
    _criticalkv,
    PolicyInfo(
        "criticalkv",
        "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, "
        "arXiv 2502.03805",
        "Half of each head's budget by score, half by score times the value's projected norm.",
        {"select": "two stages: highest score, then (score + epsilon) * ||v W_O||"},
        (
            Parameter("alpha", 0.5, "part of the budget chosen by score alone", 0.0, 1.0),
            Parameter("epsilon", 1e-4, "added to the score in the second stage", 0.0),
            Parameter(
                "norm", "l1", "l1 (exact, reads W_O) or l2 (Gram matrix)", choices=("l1", "l2")
            ),
        ),
        modifies=("snapkv", "adakv", "headkv", "pyramidkv", "h2o"),
    ),
)
add_modifier(
    _window,
    PolicyInfo(
        "window",
        "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
        "Keeps a share of the budget for the most recent tokens.",
        {"protect": "the most recent recent_fraction of the budget"},
        (Parameter("recent_fraction", 0.1, "part of the budget for recent tokens", 0.0, 1.0),),
        modifies=("keydiff", "knorm", "tova"),
    ),
)
add_modifier(
    _perturbation,
    PolicyInfo(
        "obcache",
        "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference, "
        "arXiv 2510.07651",
        "Entries without which the observed queries' attention outputs would change most.",
        {"score": "squared change of the window's attention outputs, instead of their attention"},
        (
            Parameter(
                "variant",
                "joint",
                "what is pruned of an entry: its value, its key, or both",
                choices=("joint", "value", "key"),
            ),
        ),
        modifies=("snapkv", "h2o"),
    ),
)
