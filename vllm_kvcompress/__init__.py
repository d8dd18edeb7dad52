"""vLLM extension that compresses the paged KV cache while vLLM serves."""

__version__ = "0.1.0"
