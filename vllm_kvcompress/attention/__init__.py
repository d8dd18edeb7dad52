"""Attention of a step's compressed requests: their rows, pages and lengths."""
