"""What scripts/gpu_check.py checks and measures; needs torch, triton and an NVIDIA GPU."""
