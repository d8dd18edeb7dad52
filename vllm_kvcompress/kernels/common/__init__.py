"""Shared by operators: their inputs, launches, and parts of kernels."""
