"""What `scripts/measure/claims.py` measures, by paper."""
