"""How unusual keys are (KeyDiff)."""

from vllm_kvcompress.kernels.keydiff import reference

keydiff_scores = reference.keydiff_scores
