"""Which policies exist, what a policy string stands for, and which combinations are refused.

Modules of this folder and of `merging/` are found by being there; a policy in another package by an
entry point of the group `vllm_kvcompress.policies` that names its class.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import combinations
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, TypeVar

from vllm_kvcompress.config.auto import AUTO, MEASURING_PART, NO_POLICY, named_policy
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies.parts.parameters import check_parameters
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.policy import Modifier, Part, Policy, Stages

AnyPart = TypeVar("AnyPart", bound=Part)
ENTRY_POINTS = "vllm_kvcompress.policies"
# In the order in which they are listed; modules that are not named here follow.
LISTED_FIRST = (
    *("streamingllm", "knorm", "keydiff", "leverage", "tova", "h2o", "snapkv", "attention"),
    *("pyramidkv", "adakv", "headkv", "duoattention", "expected", "rkv", "triattention"),
    *("spans", "keyspans", "criticalkv", "obcache"),
    *("merging.cam", "merging.d2o", "merging.momentkv", "merging.kvmerger", "merging.asymkv"),
    *("merging.kvslimmer",),
)
_NEVER_RUN = "streamingllm"  # stands in where nothing is compressed, since it needs nothing


def policies() -> dict[str, type[Policy]]:
    """Every policy by name.

    Raises:
        ConfigError: a policy of another package is broken, or has a name that is taken.
    """
    return _known()[0]


def modifiers() -> dict[str, type[Modifier]]:
    """Every modifier by name; raises like `policies`."""
    return _known()[1]


def all_policies() -> tuple[type[Part], ...]:
    """Every policy, then every modifier; raises like `policies`."""
    return (*policies().values(), *modifiers().values())


def bases_of(part: type[Part]) -> tuple[str, ...]:
    """Names of the policies that a modifier can modify, in its order; none for a policy."""
    if not issubclass(part, Modifier):
        return ()
    order = {name: index for index, name in enumerate(part.goes_on)}
    fitting = [name for name, policy in policies().items() if part.fits(policy)]
    return tuple(sorted(fitting, key=lambda name: order.get(name, len(order))))


@cache
def _known() -> tuple[dict[str, type[Policy]], dict[str, type[Modifier]]]:
    policies: dict[str, type[Policy]] = {}
    modifiers: dict[str, type[Modifier]] = {}
    for part, package in (*_own_parts(), *_foreign_parts()):
        known: dict[str, Any] = policies if issubclass(part, Policy) else modifiers
        if part.name in known:
            raise ConfigError(
                f'{package}: expected policies with names of their own, found "{part.name}", which '
                f"{known[part.name].__module__} has; rename it, or uninstall the package."
            )
        known[part.name] = part
    return policies, modifiers


def _own_parts() -> Iterator[tuple[type[Part], str]]:
    package = sys.modules[__package__]
    prefix = f"{package.__name__}."
    present = sorted(module.name for module in walk_packages(package.__path__, prefix))
    for name in dict.fromkeys((*(prefix + module for module in LISTED_FIRST), *present)):
        for part in vars(import_module(name)).values():
            own = inspect.isclass(part) and part.__module__ == name
            if own and issubclass(part, Part) and "name" in vars(part):
                yield part, name


def _foreign_parts() -> Iterator[tuple[type[Part], str]]:
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        package = f"package {entry.dist.name if entry.dist else entry.module} ({entry.value})"
        try:
            part = entry.load()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{package}: expected a policy that can be imported, found {reason}; repair the "
                "package, or uninstall it."
            ) from error
        if defect := _defect(part):
            raise ConfigError(
                f"{package}: expected a frozen dataclass of vllm_kvcompress.policies.Policy or "
                f"Modifier, found {defect}; repair the package, or uninstall it."
            )
        yield part, package


def _defect(part: object) -> str:
    """Why an object is no valid policy or modifier; empty: it is one."""
    if not inspect.isclass(part) or not issubclass(part, Policy | Modifier):
        return repr(part)
    if not getattr(vars(part).get("__dataclass_params__"), "frozen", False):
        return "a class that is none"
    for attribute, kind in (("name", str), ("paper", str), ("summary", str), ("stages", Stages)):
        if not isinstance(getattr(part, attribute, None), kind):
            return f"{attribute} = {getattr(part, attribute, None)!r}"
    if not re.fullmatch("[a-z][a-z0-9_-]*", part.name) or part.name in (AUTO, NO_POLICY):
        return f"the name {part.name!r}"
    if missing := sorted(part.__abstractmethods__):
        return f"one without {' and '.join(missing)}"
    try:
        check_parameters(part.name, part.parameters(), {})
    except ConfigError as error:
        return f"a default that is refused ({error})"
    return ""


def reads_profile(policy: str) -> bool:
    """Whether a policy string needs a profile of heads; raises like `describe`."""
    return policy != NO_POLICY and any(part.profile is not None for part in describe(policy))


def describe(policy: str) -> tuple[type[Policy], *tuple[type[Modifier], ...]]:
    """Parts of a policy string: the policy, then its modifiers in order.

    Raises:
        ConfigError: an unknown part, no policy or two, or a modifier that does not fit.
    """
    names = [name.strip() for name in named_policy(policy).split("+")]
    for name in names:
        if name not in policies() and name not in modifiers():
            raise ConfigError(
                f'unknown policy "{name}" in "{policy}"; policies are {", ".join(policies())}; '
                f"modifiers are {', '.join(modifiers())}."
            )
    bases = [name for name in names if name in policies() and not _modifies_another(name, names)]
    if len(bases) != 1:
        why = "a modifier needs something to modify"
        if bases:
            why = _why_not_both(*(policies()[name] for name in bases[:2]))
        raise ConfigError(
            f'policy "{policy}": expected one policy and any modifiers, found {len(bases)} '
            f"policies, and {why}; choose one of {', '.join(bases or policies())}."
        )
    base = policies()[bases[0]]
    on_top = [modifiers()[name] for name in names if name in modifiers() and name not in bases]
    on_top.sort(key=lambda part: not part.stages.protect)  # others divide what that leaves
    if len(set(on_top)) < len(on_top):
        raise ConfigError(f'policy "{policy}": a modifier is named twice; once is enough.')
    for modifier in on_top:
        if not modifier.fits(base):
            raise ConfigError(
                f'policy "{policy}": {_why_not(modifier, base)}; '
                f"{modifier.name} goes with {', '.join(bases_of(modifier))}."
            )
    for first, second in combinations((base, *on_top), 2):
        if why := _why_not_beside(first, second):
            raise ConfigError(f'policy "{policy}": {why}; leave one out.')
    return (base, *on_top)


def merging_part(policy: str) -> str:
    """Returns the part of a policy that merges evicted tokens; empty: it only evicts."""
    merging = {part.name for part in all_policies() if part.stages.merge}
    return next((name for name in map(str.strip, policy.split("+")) if name in merging), "")


def _modifies_another(name: str, names: list[str]) -> bool:
    """Whether a name that is both policy and modifier is the modifier here (pyramidkv+adakv)."""
    others = [policies()[other] for other in names if other in policies()]
    return name in modifiers() and any(modifiers()[name].fits(other) for other in others)


def _why_not_both(first: type[Policy], second: type[Policy]) -> str:
    """Why two policies exclude each other."""
    if first is second:
        return "the same one twice changes nothing"
    for decision in first.decides:
        if decision in second.decides:
            return f"{first.name} and {second.name} both decide {decision}"
    independent = f"{first.name} and {second.name} each decide on their own what to keep"
    return _refused(first, second) or independent


def _why_not(modifier: type[Modifier], base: type[Policy]) -> str:
    """Why a modifier cannot modify a policy."""
    if why := _refused(modifier, base):
        return why
    if modifier.stages.merge and base.stages.merge:
        return f"{base.name} already merges the evicted tokens, which would be counted twice"
    return modifier.otherwise.format(base.name)


def _why_not_beside(first: type[Part], second: type[Part]) -> str:
    """Why two parts of a policy string exclude each other; empty: they do not."""
    if first.stages.merge and second.stages.merge:
        return (
            f"{first.name} and {second.name} would both merge the same evicted tokens, and count "
            "them twice"
        )
    shared = {p.name for p in first.parameters()} & {p.name for p in second.parameters()}
    if shared:
        return f"{first.name} and {second.name} both have a parameter {' and '.join(shared)}"
    return _refused(first, second)


def _refused(first: type[Part], second: type[Part]) -> str:
    """Why one of two parts refuses the other; empty: neither does."""
    reason = first.refuses.get(second.name, "").format(second.name)
    return reason or second.refuses.get(first.name, "").format(first.name)


def resolve(
    policy: str,
    params: Mapping[str, object] | None = None,
    profile: Path | None = None,
    measures_heads: bool = False,
) -> Pipeline:
    """Builds the pipeline that a policy string stands for.

    Bind it to the model's layers and heads with `Pipeline.bind` before use.

    Args:
        policy: a policy and modifiers joined by `+`, such as `adakv+criticalkv`; or `auto`.
        params: parameters of the parts by name, where they differ from the defaults.
        profile: the profile file, for the policies that need one.
        measures_heads: whether heads that no file has are measured before the policy is used.

    Raises:
        ConfigError: says what is wrong, why, and what is valid.
    """
    parts = describe(policy)
    values = check_parameters(
        policy, [p for part in parts for p in part.parameters()], params or {}
    )
    _check_profile(parts, profile, measures_heads)

    def built(part: type[AnyPart]) -> AnyPart:
        made = part(**{parameter.name: values[parameter.name] for parameter in part.parameters()})
        return made if part.profile is None or profile is None else made.with_profile(profile)

    name = "+".join(part.name for part in parts)
    base, *on_top = parts
    pipeline = replace(built(base).pipeline(), name=name, params=values)
    for modifier in on_top:
        pipeline = built(modifier).modify(pipeline)
    return pipeline


def resolve_settings(settings: Settings) -> dict[str, Pipeline]:
    """Builds the pipelines of a server by policy: its default one, then those of requests.

    Where nothing is ever compressed the only pipeline is one that needs nothing.

    Raises:
        ConfigError: as for `resolve`; a budget that protected tokens alone would exceed; or
            policies whose attention cannot share a batch.
    """
    if not settings.policies:
        return {NO_POLICY: resolve(_NEVER_RUN)}
    pipelines: dict[str, Pipeline] = {}
    for policy in settings.policies:
        own = settings.for_request(RequestOptions(policy=policy))
        profile = None if own.profile is None else Path(own.profile)
        pipeline = resolve(policy, own.params, profile, settings.measure_heads)
        if isinstance(own.budget, int):
            pipeline.check_budget(own.budget)
        keeping = {
            "keep-prompt": settings.keep_prompt is not None,
            "protect": settings.protect,
            "protect-mode": settings.span_share is None and policy == settings.policy,
            "after-reasoning": settings.after_reasoning is not None,
        }
        option = next((name for name, given in keeping.items() if given), None)
        if option is not None and pipeline.merger is not None:
            raise ConfigError(
                f"--kv-{option}: {policy} merges evicted tokens in the order of "
                "the prompt, which kept ones would change; give another policy, or leave it out."
            )
        share = own.span_share if pipeline.merger is None else 1.0  # nothing is protected there
        pipelines[policy] = replace(pipeline, repeats=own.repeats, span_share=share)
    for policy, pipeline in pipelines.items():
        others = [name for name in pipelines if name != policy]
        if pipeline.needs_biased_attention and others:
            raise ConfigError(
                f"{policy} changes the attention to kept tokens, so requests with it and with "
                f"{others[0]} cannot share a server; allow requests other policies."
            )
    return pipelines


def _check_profile(parts: Sequence[type[Part]], path: Path | None, measures: bool) -> None:
    """Refuses a missing profile, and one that no part reads."""
    policy = "+".join(part.name for part in parts)
    kinds = [part.profile for part in parts if part.profile is not None]
    if kinds and path is None and not (measures and set(kinds) == {MEASURING_PART}):
        raise ConfigError(
            f"{policy} needs measured heads; give a file with --kv-profile, which "
            f"`vllm-kvcompress profile MODEL --kind {kinds[0]} --out FILE` makes for any model."
        )
    if path is not None and not kinds:
        readers = dict.fromkeys(part.name for part in all_policies() if part.profile is not None)
        raise ConfigError(
            f"{policy} measures heads while it runs and reads no profile; leave --kv-profile "
            f"out, or use {' or '.join(readers)}."
        )
