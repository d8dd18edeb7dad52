"""Shortens prompts before they are tokenised; frees nothing of the cache."""
