"""How unusual keys are (KeyDiff)."""
