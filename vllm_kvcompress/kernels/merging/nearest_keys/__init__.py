"""The kept key that is most similar to each evicted one (D2O)."""
