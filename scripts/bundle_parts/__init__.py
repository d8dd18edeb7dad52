"""Parts of scripts/gpu_bundle.py."""
