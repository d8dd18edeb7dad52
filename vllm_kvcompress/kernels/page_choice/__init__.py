"""Which pages a decode step reads: products with their keys, their means, or bounds on them."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.page_choice import reference
from vllm_kvcompress.kernels.page_choice.reference import (
    Choice,
    highest_products,
    key_bounds,
    key_means,
    rounded_outwards,
)

choose_pages = by_device(
    reference.choose_pages, "page_choice.page_choice_triton", "page_choice.page_choice_numba"
)

__all__ = [
    "Choice",
    "choose_pages",
    "highest_products",
    "key_bounds",
    "key_means",
    "rounded_outwards",
]
