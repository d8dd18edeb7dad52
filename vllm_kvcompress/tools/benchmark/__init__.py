"""What compression does to serving: loads, driven through stock and compressed engines in turns."""
