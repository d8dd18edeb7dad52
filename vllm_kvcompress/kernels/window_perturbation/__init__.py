"""How much attention outputs change when an entry is pruned (OBCache)."""
