"""How far values are from their weighted mean."""
