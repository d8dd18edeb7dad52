"""Attention over pages of which every head holds its own."""
