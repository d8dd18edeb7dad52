"""Prompts made shorter before they are tokenised: less to read, and nothing of the cache freed."""
