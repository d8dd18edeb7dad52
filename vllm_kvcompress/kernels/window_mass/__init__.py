"""The observation window's attention to each entry (SnapKV)."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.window_mass import reference

window_mass = by_device(reference.window_mass, "window_mass.window_mass_triton")
