"""Operators of policies that merge evicted entries, or correct attention for them."""
