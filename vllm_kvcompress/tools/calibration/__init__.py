"""Calibration: how much a policy loses at which budget on texts, and what follows for a promise."""
