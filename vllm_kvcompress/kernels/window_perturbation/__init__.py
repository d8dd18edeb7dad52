"""How much attention outputs change when an entry is pruned (OBCache)."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.window_perturbation import reference

window_perturbation = by_device(
    reference.window_perturbation, "window_perturbation.perturbation_triton"
)
