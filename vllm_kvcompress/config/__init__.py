"""What a user or a request may set, and what follows from it."""
