"""Policies, which choose what to keep of a request's cache: one file for every paper.

score -> protect -> allocate -> select -> merge -> correct; see `docs/writing-a-policy.md`. What a
policy's file needs can be imported from here.
"""

from vllm_kvcompress.policies.base import EntryState, LayerView, Merged, Merger, ModelHeads, Needs
from vllm_kvcompress.policies.parts.allocation import Allocator
from vllm_kvcompress.policies.parts.parameters import parameter
from vllm_kvcompress.policies.parts.selection import Protection, Selector
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.policy import Modifier, Part, Policy, Stages
from vllm_kvcompress.policies.registry import (
    all_policies,
    bases_of,
    describe,
    resolve,
    resolve_settings,
)

__all__ = [
    "Allocator",
    "EntryState",
    "LayerView",
    "Merged",
    "Merger",
    "ModelHeads",
    "Modifier",
    "Needs",
    "Part",
    "Pipeline",
    "Policy",
    "Protection",
    "Selector",
    "Stages",
    "all_policies",
    "bases_of",
    "describe",
    "parameter",
    "resolve",
    "resolve_settings",
]
