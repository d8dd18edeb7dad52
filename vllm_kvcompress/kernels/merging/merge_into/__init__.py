"""Kept entries averaged with those that go to them (D2O)."""
