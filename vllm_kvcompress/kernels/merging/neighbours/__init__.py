"""How alike keys of the same head are."""

from vllm_kvcompress.kernels.merging.neighbours import reference

key_distances = reference.key_distances
neighbour_cosines = reference.neighbour_cosines
