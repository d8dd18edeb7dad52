"""Which settings are compared: policies at budgets, with and without knowing the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import ConfigError

FULL = "full"
SERVER = "server"
AWARE = "query-aware"  # context and question are compressed together
AGNOSTIC = "query-agnostic"  # the context is compressed before the question is read
MODES = {"aware": (AWARE,), "agnostic": (AGNOSTIC,), "both": (AWARE, AGNOSTIC)}


@dataclass(frozen=True)
class Setup:
    """One engine's settings.

    Attributes:
        policy: a policy string; or `full`: stock vLLM, which is what the others are compared to;
            or `server`: whatever a running server does.
        budget: kept fraction or tokens; None for `full` and `server`.
    """

    policy: str
    budget: float | int | None = None

    @property
    def name(self) -> str:
        """For tables and file names."""
        return self.policy if self.budget is None else f"{self.policy}@{self.budget:g}"

    def settings(self, params: dict[str, Any]) -> dict[str, Any] | None:
        """What goes into `--additional-config`; None: stock vLLM."""
        if self.policy == FULL:
            return None
        chosen: dict[str, Any] = {"policy": self.policy, "budget": self.budget}
        return chosen | {key: value for key, value in params.items() if value}

    def modes(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Modes to run: the full cache is the same in every one."""
        return (AWARE,) if self.policy == FULL else tuple(wanted)


def setups_of(
    policies: Sequence[str], budgets: Sequence[float | int], params: dict[str, Any]
) -> list[Setup]:
    """Every policy at every budget, and the full cache once, first.

    Raises:
        ConfigError: no policy, one given twice, or settings that cannot work.
    """
    if len(set(policies)) < len(policies) or len(set(budgets)) < len(budgets):
        raise ConfigError("--policies and --budgets: expected every one once; remove the doubles.")
    setups = [Setup(FULL)]
    setups += [Setup(policy, b) for policy in policies if policy != FULL for b in budgets]
    for setup in setups:
        chosen = setup.settings(params)
        if chosen is not None:
            from vllm_kvcompress.policies import resolve_settings

            resolve_settings(Settings.from_dict(chosen))
    return setups
