"""What several policies are made of."""
