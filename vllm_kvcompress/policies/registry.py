"""How a policy string is resolved, and which combinations are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import profiles
from vllm_kvcompress.policies.parameters import check_parameters
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.presets import MODIFIERS, POLICIES, PolicyInfo, Values
from vllm_kvcompress.policies.presets_merging import MERGERS
from vllm_kvcompress.policies.profiles import HeadProfile


def all_policies() -> tuple[PolicyInfo, ...]:
    """Every policy, then every modifier."""
    return tuple(info for info, _ in (*POLICIES.values(), *MODIFIERS.values()))


def describe(policy: str) -> tuple[PolicyInfo, ...]:
    """The parts of a policy string: the policy, then its modifiers in order.

    Raises:
        ConfigError: an unknown part, no policy or two, or a modifier that does not fit.
    """
    parts = [part.strip() for part in policy.split("+")]
    for part in parts:
        if part not in POLICIES and part not in MODIFIERS:
            raise ConfigError(
                f'unknown policy "{part}" in "{policy}"; policies are {", ".join(POLICIES)}; '
                f"modifiers are {', '.join(MODIFIERS)}."
            )
    bases = [part for part in parts if part in POLICIES and not _modifies_another(part, parts)]
    if len(bases) != 1:
        why = "a modifier needs something to modify" if not bases else _why_not_both(bases)
        raise ConfigError(
            f'policy "{policy}": expected one policy and any modifiers, found {len(bases)} '
            f"policies, and {why}; choose one of {', '.join(bases or POLICIES)}."
        )
    modifiers = [part for part in parts if part in MODIFIERS and part not in bases]
    if len(set(modifiers)) < len(modifiers):
        raise ConfigError(f'policy "{policy}": a modifier is named twice; once is enough.')
    for name in modifiers:
        valid = MODIFIERS[name][0].modifies
        if bases[0] not in valid:
            raise ConfigError(
                f'policy "{policy}": {_why_not(name, bases[0])}; '
                f"{name} goes with {', '.join(valid)}."
            )
    _refuse_pairs(policy, [bases[0], *modifiers])
    return (POLICIES[bases[0]][0], *(MODIFIERS[name][0] for name in modifiers))


def _refuse_pairs(policy: str, parts: list[str]) -> None:
    """Refuses parts that each fit their base but not each other."""
    mergers = [part for part in parts if part in MERGERS]
    if len(mergers) > 1:
        raise ConfigError(
            f'policy "{policy}": {" and ".join(mergers)} would both make something of the same '
            "evicted tokens, and count them twice; leave one out."
        )
    if {"obcache", "criticalkv"} <= set(parts):
        raise ConfigError(
            f'policy "{policy}": obcache and criticalkv both weigh attention with values; leave '
            "one out."
        )


def _modifies_another(part: str, parts: list[str]) -> bool:
    """Whether a name that is both policy and modifier is the modifier here (pyramidkv+adakv)."""
    return part in MODIFIERS and any(other in MODIFIERS[part][0].modifies for other in parts)


def _why_not_both(bases: list[str]) -> str:
    """Why the first two policies do not go together."""
    first, second = bases[:2]
    pair = {first, second}
    if first == second:
        return "the same one twice changes nothing"
    if len(pair & {"adakv", "headkv", "duoattention"}) == 2:
        return f"{first} and {second} both decide how much each head keeps"
    if "pyramidkv" in pair and pair & {"headkv", "duoattention"}:
        return f"{first} and {second} both decide how much each layer keeps"
    if "adakv" in pair and (others := pair & {"knorm", "streamingllm", "tova", "keydiff"}):
        return (
            "adakv divides a layer's budget by each head's attention mass, which "
            f"{others.pop()} does not score"
        )
    return f"{first} and {second} each decide on their own what to keep"


def _why_not(modifier: str, base: str) -> str:
    if modifier == "criticalkv" and base == "tova":
        return "criticalkv chooses inside each head, and tova keeps the same entries in all heads"
    if modifier == "criticalkv" and base == "momentkv":
        return "momentkv already weighs attention with values"
    if modifier == "criticalkv":
        return (
            f"criticalkv weighs attention mass with value norms, and the scores of {base} are "
            "no attention mass per head"
        )
    if modifier == "obcache":
        return f"obcache takes the place of the scores of snapkv or h2o, which {base} is not"
    if base in MERGERS:
        return f"{base} already makes something of the evicted tokens, which would be counted twice"
    if modifier == "cam":
        return f"cam was made for policies whose kept tokens move on, and {base} is none of them"
    return f"{base} already says which recent tokens it keeps"


def resolve(
    policy: str, params: Mapping[str, object] | None = None, profile: Path | None = None
) -> Pipeline:
    """The pipeline that a policy string stands for.

    Bind it to the model's layers and heads with `Pipeline.bind` before use.

    Args:
        policy: a policy and modifiers joined by `+`, such as `adakv+criticalkv`.
        params: overrides of the parts' parameters, by name.
        profile: the profile file, for the policies that need one.

    Raises:
        ConfigError: says what is wrong, why, and what is valid.
    """
    infos = describe(policy)
    parameters = [p for info in infos for p in info.parameters]
    values = check_parameters(policy, parameters, params or {})
    heads = _load_profile(infos[0], profile, values)
    pipeline = POLICIES[infos[0].name][1](values, heads)
    for info in infos[1:]:
        pipeline = MODIFIERS[info.name][1](pipeline, values)
    name = "+".join(info.name for info in infos)
    return replace(pipeline, name=name, params=values, profile=heads)


def resolve_settings(settings: Settings) -> dict[str, Pipeline]:
    """The pipelines of a user's settings by policy: the server's own, then those of requests.

    Raises:
        ConfigError: as `resolve`; a budget that protected tokens alone would use up; or policies
            whose attention cannot share a batch.
    """
    pipelines: dict[str, Pipeline] = {}
    for policy in settings.policies:
        own = settings.for_request(policy, None)
        profile = None if own.profile is None else Path(own.profile)
        pipeline = resolve(policy, own.params, profile)
        if isinstance(own.budget, int):
            pipeline.check_budget(own.budget)
        pipelines[policy] = replace(pipeline, repeats=own.repeats)
    for policy, pipeline in pipelines.items():
        others = [name for name in pipelines if name != policy]
        if pipeline.gathers and others:
            raise ConfigError(
                f"{policy} changes how what it keeps is attended to, so requests with it and with "
                f"{others[0]} cannot share a server; allow requests other policies."
            )
    return pipelines


def _load_profile(info: PolicyInfo, path: Path | None, values: Values) -> HeadProfile | None:
    if info.profile is None:
        if path is not None:
            raise ConfigError(
                f"{info.name} measures heads while it runs and reads no profile; leave "
                "--kv-profile out, or use headkv or duoattention."
            )
        return None
    if path is None:
        raise ConfigError(
            f"{info.name} needs measured heads; give a file with --kv-profile, which "
            f"`vllm-kvcompress profile MODEL --kind {info.profile} --out FILE` makes for any model."
        )
    if info.profile == profiles.HEADKV:
        return profiles.load_headkv(path, values["temperature"])
    return profiles.load_duoattention(path)
