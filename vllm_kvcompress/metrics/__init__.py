"""What events did, from a step to /metrics."""
