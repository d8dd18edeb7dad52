"""Norms of values after the output projection (CriticalKV)."""
