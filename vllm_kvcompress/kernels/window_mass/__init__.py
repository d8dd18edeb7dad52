"""The attention of an observation window (SnapKV's), or of several, to each entry."""

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.window_mass import reference

Window = reference.Window
window_mass = by_device(reference.window_mass, "window_mass.window_mass_triton")
window_masses = by_device(reference.window_masses, "window_mass.window_mass_triton")
