"""What the policy `auto` stands for, and where measured heads lie."""

from __future__ import annotations

from pathlib import Path

from vllm_kvcompress.scheduling.budgets import Budget

NO_POLICY = "none"
AUTO = "auto"  # stands for DEFAULT_POLICY, wherever a policy is named
DEFAULT_POLICY = "spans"  # see "Which one" in docs/policies.md
# What AUTO stands for where heads are measured: from this fraction on, below it, and with a budget
# in tokens, whose fraction depends on the prompt.
PROFILED_POLICY, PROFILED_FROM = "attention+headkv", 0.25
PROFILED_POLICY_BELOW, PROFILED_POLICY_IN_TOKENS = "keyspans+headkv", "spans+headkv"
PROFILED_POLICIES = (PROFILED_POLICY, PROFILED_POLICY_BELOW, PROFILED_POLICY_IN_TOKENS)
MEASURING_PART = "headkv"  # of policies that an engine measures heads for
MEASURED_HEADS = "kv_heads.json"  # in a model's folder, a profile of the kind `headkv`
DEFAULT_BUDGET = 0.5  # fraction of each prompt; see docs/results/spans.md


def named_policy(policy: str, has_heads: bool = False, budget: Budget = DEFAULT_BUDGET) -> str:
    """Returns a policy's name; for `auto` the one it stands for.

    With measured heads that is `attention+headkv` from a quarter of the prompt on. Below, it is
    `keyspans+headkv`, which also keeps keys that no query has attended to, as `spans+headkv` does,
    which it is with a budget in tokens (docs/results/spans.md).
    """
    if policy != AUTO:
        return policy
    if not has_heads:
        return DEFAULT_POLICY
    if not isinstance(budget, float):
        return PROFILED_POLICY_IN_TOKENS
    return PROFILED_POLICY if budget >= PROFILED_FROM else PROFILED_POLICY_BELOW


def profile_beside(model: str | Path) -> str | None:
    """Returns the measured heads in a model's folder; None without any, or for a hub's name."""
    path = Path(model) / MEASURED_HEADS
    return str(path) if path.is_file() else None
