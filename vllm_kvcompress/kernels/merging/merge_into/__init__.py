"""Kept entries averaged with those that go to them (D2O)."""

from vllm_kvcompress.kernels.merging.merge_into import reference

merge_into = reference.merge_into
