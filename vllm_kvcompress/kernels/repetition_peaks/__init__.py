"""The highest attention that a repetition pays to each token of its context (KVzip)."""

from vllm_kvcompress.kernels.repetition_peaks import reference

repetition_peaks = reference.repetition_peaks
