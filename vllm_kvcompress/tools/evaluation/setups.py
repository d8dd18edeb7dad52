"""The settings that an evaluation compares: policies at budgets, and the modes of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.config.auto import NO_POLICY, named_policy
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.budgets import parse_budget
from vllm_kvcompress.scheduling.read_rule import ReadRule

FULL = "full"
SERVER = "server"
AWARE = "query-aware"  # context and question are compressed together
AGNOSTIC = "query-agnostic"  # the context is compressed before the question is read
PREPARED = "prepared"  # query-agnostic, scored by the attention of a repetition of the context
TEXT = "text"  # texts are compressed before what follows them is predicted
MODES = {
    "aware": (AWARE,),
    "agnostic": (AGNOSTIC,),
    "both": (AWARE, AGNOSTIC),
    "prepared": (PREPARED,),
}
ASKED = (AWARE, AGNOSTIC, PREPARED)


@dataclass(frozen=True)
class Setup:
    """One engine's settings.

    Attributes:
        policy: a policy string; or `full`, stock vLLM, the baseline; or `server`, a running server.
        budget: kept fraction or tokens; None for `full`, `server` and `none`.
        read: the `--kv-read` of decode steps; None: everything.
    """

    policy: str
    budget: float | int | None = None
    read: str | None = None

    @property
    def name(self) -> str:
        """The setup's name in tables and file names."""
        held = self.policy if self.budget is None else f"{self.policy}@{self.budget:g}"
        if self.read is None:
            return held
        return self.read if self.policy == NO_POLICY else f"{held} {self.read}"

    def settings(self, params: dict[str, Any]) -> dict[str, Any] | None:
        """The section of `--additional-config`; None: stock vLLM."""
        if self.policy == FULL:
            return None
        read = {} if self.read is None else {"read": self.read}
        if self.policy == NO_POLICY:
            return {"policy": self.policy, **read}
        from vllm_kvcompress.policies.registry import reads_profile

        chosen: dict[str, Any] = {"policy": self.policy, "budget": self.budget, **read}
        if not reads_profile(self.policy):
            params = params | {"profile": None}
        return chosen | {key: value for key, value in params.items() if value or value == 0}

    def modes(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The modes to ask questions in: one if nothing is evicted, since all would be equal."""
        return (AWARE,) if self.policy in (FULL, NO_POLICY) else tuple(wanted)

    def read_part(self, num_tokens: int, block_size: int) -> float:
        """The fraction of `num_tokens` resident tokens that a decode step reads."""
        if self.read is None:
            return 1.0
        num_read = ReadRule.parse(self.read).read_pages(num_tokens, block_size)
        return num_read / ceil_div(num_tokens, block_size)


@dataclass
class SharedEngine:
    """Setups that one engine serves, since requests may choose policy and budget.

    Attributes:
        setups: the first one is the engine's own.
        params: those of `Setup.settings`.
    """

    setups: list[Setup]
    params: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any] | None:
        """The engine's `Setup.settings`, with what requests may ask for."""
        own, *others = self.setups
        settings = own.settings(self.params)
        if settings is None or not others:
            return settings
        policies = dict.fromkeys(setup.policy for setup in others if setup.policy != own.policy)
        budgets = [setup.budget for setup in self.setups if setup.budget is not None]
        bounds = {"min_request_budget": min(budgets), "max_request_budget": max(budgets)}
        return settings | {"request_policies": list(policies)} | bounds

    def choice(self, setup: Setup) -> dict[str, Any]:
        """The policy and budget that a request chooses for a setup."""
        if len(self.setups) == 1:
            return {}
        return {"policy": setup.policy, "budget": setup.budget}

    def takes(self, setup: Setup) -> bool:
        """Whether this engine can serve another setup: a fraction, and a policy that may join."""
        setups = [*self.setups, setup]
        if any(not isinstance(each.budget, float) or each.read is not None for each in setups):
            return False
        policies = {each.policy for each in setups}
        has_own = self.params.get("params") or self.params.get("profile")  # of one policy
        if SERVER in policies or (has_own and setup.policy != self.setups[0].policy):
            return False
        from vllm_kvcompress.policies import resolve_settings

        try:
            resolve_settings(Settings.from_dict(SharedEngine(setups, self.params).settings))
        except ConfigError:
            return False
        return True


def shared_engines(setups: Sequence[Setup], params: dict[str, Any]) -> list[SharedEngine]:
    """Groups setups into engines: each joins the first engine that can serve it."""
    engines: list[SharedEngine] = []
    for setup in setups:
        engine = next((engine for engine in engines if engine.takes(setup)), None)
        if engine is None:
            engines.append(SharedEngine([setup], params))
        else:
            engine.setups.append(setup)
    return engines


def setups_of(
    policies: Sequence[str],
    budgets: Sequence[float | int | str],
    params: dict[str, Any],
    reads: Sequence[str] = (),
    by_loss: Callable[[str, str], float] | None = None,
) -> list[Setup]:
    """Lists the setups: the full cache, every policy at every budget, and sparse reads.

    Args:
        policies, budgets: combined with each other.
        params: those of `Setup.settings`.
        reads: values of `--kv-read`; POLICY@BUDGET before one compresses as well.
        by_loss: the fraction of a policy for a budget that is a text, such as loss:0.02.

    Raises:
        ConfigError: no policy, one given twice, or settings that cannot work.
    """
    has_heads = bool(params.get("profile")) or params.get("measure_heads", True)
    setups = [Setup(FULL)]
    for policy in policies:
        for budget in budgets if policy != FULL else ():
            if isinstance(budget, str):
                assert by_loss is not None, "a budget by loss without a calibration"
                budget = by_loss(policy, budget)
            setups.append(Setup(named_policy(policy, has_heads, budget), budget))
    if len(set(setups)) < len(setups) or len(set(policies)) < len(policies):
        raise ConfigError("--policies and --budgets: expected every one once; remove the doubles.")
    setups += [_reading(text, has_heads) for text in dict.fromkeys(reads)]
    for setup in setups:
        chosen = setup.settings(params)
        if chosen is not None:
            from vllm_kvcompress.policies import resolve_settings

            resolve_settings(Settings.from_dict(chosen))
    return setups


def _reading(text: str, has_heads: bool) -> Setup:
    """Parses one `--kv-read` of eval, such as `spans@0.5 quest:0.5`."""
    held, _, read = text.strip().rpartition(" ")
    if not held:
        return Setup(NO_POLICY, read=read)
    policy, at, budget = held.strip().rpartition("@")
    if not at:
        raise ConfigError(
            f'--kv-read "{text}": expected POLICY@BUDGET before what is read of it, such as '
            f'"spans@0.5 quest:0.5", found "{held}".'
        )
    parsed = parse_budget(budget)
    return Setup(named_policy(policy, has_heads, parsed), parsed, read)
