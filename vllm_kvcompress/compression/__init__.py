"""One compression event: what a policy sees, decides and leaves behind."""
