"""How alike keys of the same head are."""
