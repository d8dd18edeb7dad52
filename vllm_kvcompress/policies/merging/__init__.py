"""Policies that put something in the place of what they evict, a paper each."""
