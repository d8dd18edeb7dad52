"""The kept key that is most similar to each evicted one (D2O)."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.merging.nearest_keys import reference

nearest_keys = by_device(reference.nearest_keys, "merging.nearest_keys.nearest_triton")
