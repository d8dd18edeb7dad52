"""Policies on a model without an engine: whole caches, with evicted tokens masked."""
