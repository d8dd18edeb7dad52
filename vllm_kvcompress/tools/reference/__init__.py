"""The synthetic retrieval tasks on which the reference model is trained."""
