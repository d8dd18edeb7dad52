"""Kept values with what evicted ones give to them (CaM)."""
