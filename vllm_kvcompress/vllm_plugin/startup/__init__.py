"""Start-up in every process: versions of vLLM, refusals, and registration."""
