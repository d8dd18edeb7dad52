"""Training of the reference model, for `train_reference.py`."""
