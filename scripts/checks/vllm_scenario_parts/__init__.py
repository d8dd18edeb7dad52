"""Scenarios of vLLM's own tests, written anew, for a server and for an engine."""
