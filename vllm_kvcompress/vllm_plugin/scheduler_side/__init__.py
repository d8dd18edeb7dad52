"""The scheduler process: plans events, owns blocks, and reports what was done."""
