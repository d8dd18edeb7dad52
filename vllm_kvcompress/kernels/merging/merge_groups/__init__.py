"""Groups of neighbours, merged."""

from vllm_kvcompress.kernels.merging.merge_groups import reference

merge_groups = reference.merge_groups
