"""Policies: what to keep of a request's cache, a file for every paper.

score -> protect -> allocate -> select -> merge -> correct; see `docs/writing-a-policy.md`.
"""

from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.policy import Modifier, Part, Policy
from vllm_kvcompress.policies.registry import all_policies, describe, resolve, resolve_settings

__all__ = [
    "Modifier",
    "Part",
    "Pipeline",
    "Policy",
    "all_policies",
    "describe",
    "resolve",
    "resolve_settings",
]
