"""What operators share: their inputs, launches, and pieces of kernels."""
