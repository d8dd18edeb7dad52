"""Pooling of scores over neighbouring entries."""

from vllm_kvcompress.kernels.pooling import reference

max_or_mean_pool = reference.max_or_mean_pool
max_within = reference.max_within
