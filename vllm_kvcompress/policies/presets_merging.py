"""Policies and modifiers that put something in the place of what is evicted."""

from __future__ import annotations

from dataclasses import replace

from vllm_kvcompress.policies.allocate import Ada, Uniform
from vllm_kvcompress.policies.key_weights import AsymProxy, Gaussian, Slimmer
from vllm_kvcompress.policies.links import CosineLinks, GroupMerger, Groups, KeyWeights, LightLinks
from vllm_kvcompress.policies.merge import CacheMerging, SimilarKeys
from vllm_kvcompress.policies.moments import MomentResiduals, Moments
from vllm_kvcompress.policies.parameters import Parameter
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.presets import (
    ACCUMULATED,
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
from vllm_kvcompress.policies.window import AccumulatedMass, WindowMass

MERGERS = ("kvmerger", "asymkv", "kvslimmer", "cam", "d2o", "momentkv", "momentfix")
MOMENTKV_PAPER = (
    "MomentKV: Closing the Directional Gap in KV Cache Eviction for Long-Context Inference, "
    "arXiv 2606.01563"
)
EVICTING = tuple(POLICIES)
MERGE_SPACE = "keys as they are cached (rotated), or re-rotated to one position first (unrotated)"
PAIR_STAGES = {
    "score": "mean attention of the last window_size queries",
    "protect": "the first num_sinks tokens",
    "allocate": "the same for every layer and head",
    "select": "links of the lightest neighbours, later ones first",
    "merge": "a group's keys by their weights, values by how many tokens they stand for",
}
PAIR_PARAMETERS = (
    Parameter("window_size", 128, "last queries whose attention is averaged", minimum=1),
    Parameter("num_sinks", 32, "first tokens kept", minimum=0),
    Parameter("merge_space", "unrotated", MERGE_SPACE, choices=("rotated", "unrotated")),
)


def _d2o(values: Values, profile: HeadProfile | None) -> Pipeline:
    return Pipeline(
        "",
        AccumulatedMass(values["window_size"]),
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


def _kvmerger(values: Values, profile: HeadProfile | None) -> Pipeline:
    links = CosineLinks(
        recent_fraction=values["recent_fraction"],
        heavy_fraction=values["heavy_fraction"],
        min_cosine=-1.0 if values["budget_mode"] == "topk_links" else values["threshold"],
        max_set=values["max_set"],
    )
    return Pipeline(
        "",
        AccumulatedMass(values["window_size"]),
        Uniform(),
        Groups(links),
        Protection(recent_fraction=values["recent_fraction"]),
        merger=GroupMerger(
            links,
            Gaussian(),
            values["value_mode"],
            values_like_keys=True,
            merge_space=values["merge_space"],
            merge_position="pivot",
        ),
    )


def _pairs(values: Values, weights: KeyWeights) -> Pipeline:
    links = LightLinks(values["num_sinks"])
    return Pipeline(
        "",
        WindowMass(values["window_size"], kernel_size=1),
        Uniform(),
        Groups(links),
        Protection(num_sinks=values["num_sinks"]),
        merger=GroupMerger(links, weights, merge_space=values["merge_space"]),
    )


def _asymkv(values: Values, profile: HeadProfile | None) -> Pipeline:
    return _pairs(values, AsymProxy())


def _kvslimmer(values: Values, profile: HeadProfile | None) -> Pipeline:
    return _pairs(values, Slimmer(values["variant"]))


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
            "score": "attention accumulated over the last window_size queries of every event",
            "protect": "the first num_sinks tokens and recent_fraction of the budget",
            "allocate": "the same for every layer and head",
            "select": "highest score",
            "merge": "keys and values of evicted tokens that are similar enough, by cosine",
        },
        (
            ACCUMULATED,
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
        "AdaKV's budgets; keeps what the moments of evicted tokens do not predict, and corrects "
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
add_policy(
    _kvmerger,
    PolicyInfo(
        "kvmerger",
        "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks, "
        "arXiv 2407.08454",
        "Neighbours of similar keys become one entry that stands for all of them.",
        {
            "score": "attention accumulated over the last window_size queries of every event",
            "protect": "recent tokens, and those of the highest score",
            "allocate": "the same for every layer and head",
            "select": "links of the highest cosine between neighbouring keys",
            "merge": "a group's keys and values, weighted by closeness to its heaviest token",
        },
        (
            ACCUMULATED,
            Parameter("recent_fraction", 0.34, "part of the budget for recent tokens", 0.0, 1.0),
            Parameter("heavy_fraction", 0.24, "part of the budget for heavy tokens", 0.0, 1.0),
            Parameter(
                "budget_mode",
                "topk_links",
                "merge the most similar neighbours until the budget is met, or only those above "
                "the threshold, and evict the rest",
                choices=("topk_links", "threshold"),
            ),
            Parameter("threshold", 0.75, "least cosine in threshold mode", -1.0, 1.0),
            Parameter("max_set", 64, "tokens that may become one, at most", minimum=1),
            Parameter(
                "value_mode",
                "lossless",
                "mean of values and a bias for their number (lossless), without it (mean), or the "
                "mean times their number (paper)",
                choices=("lossless", "mean", "paper"),
            ),
            Parameter("merge_space", "rotated", MERGE_SPACE, choices=("rotated", "unrotated")),
        ),
    ),
)
add_policy(
    _asymkv,
    PolicyInfo(
        "asymkv",
        "Homogeneous Keys, Heterogeneous Values: Exploiting Local KV Cache Asymmetry for "
        "Long-Context LLMs, arXiv 2506.05410",
        "Light neighbours become one entry; keys weighted by a proxy of the gradients, which a "
        "server does not have.",
        PAIR_STAGES,
        PAIR_PARAMETERS,
    ),
)
add_policy(
    _kvslimmer,
    PolicyInfo(
        "kvslimmer",
        "KVSlimmer: Theoretical Insights and Practical Optimizations for Asymmetric KV Merging, "
        "arXiv 2603.00907",
        "AsymKV's pairs; keys weighted by the diagonal and mixed terms of the Hessian.",
        PAIR_STAGES,
        (
            *PAIR_PARAMETERS,
            Parameter(
                "variant",
                "paper",
                "Eq. 33, or what the authors' code computes",
                choices=("paper", "code"),
            ),
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
            Parameter("merge_window", 256, "last queries of an event that are observed", minimum=1),
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
