"""What `scripts/claims.py` measures, by paper."""
