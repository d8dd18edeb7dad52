"""Which pages a decode step reads: bounds on the products with their keys, and the highest ones."""

from vllm_kvcompress.kernels.page_choice.reference import choose_pages, key_bounds

__all__ = ["choose_pages", "key_bounds"]
