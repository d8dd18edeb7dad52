"""Operators over pages and over keys and values: a torch file each, kernels beside it."""
