"""Looks up in a vLLM's sources what this package relies on; see scripts/check_vllm.py."""
