"""Policies: what to keep of a request's cache, as a pipeline of small parts.

score -> protect -> allocate -> select -> merge -> correct; see `docs/writing-a-policy.md`.
"""

from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.presets import PolicyInfo
from vllm_kvcompress.policies.registry import all_policies, describe, resolve, resolve_settings

__all__ = ["Pipeline", "PolicyInfo", "all_policies", "describe", "resolve", "resolve_settings"]
