"""Statistics of compression, from a scheduler step to /metrics."""
