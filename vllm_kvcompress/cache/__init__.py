"""Where tokens, pages, queries and policy states lie in vLLM's blocks."""
