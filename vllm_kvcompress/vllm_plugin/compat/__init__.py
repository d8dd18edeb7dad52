"""Every private name of vLLM that this package relies on, and what differs between versions.

When vLLM changes, read these files first, one for each thing of vLLM's that they touch;
`scripts/checks/check_vllm.py` says what a version lacks.
"""
