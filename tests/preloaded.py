"""What every engine on a CPU does alike at its start, done once for all that are forked from here.

vLLM looks through all names of all modules for kernels that the CPU build replaces, through all
installed packages for plugins, and through all loggers for their levels.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import walk_packages

from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.platforms.cpu import CpuPlatform

from vllm_kvcompress import policies

MODULES = (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.lora.resolver",
    "vllm.model_executor.layers.quantization.online",
    "vllm.v1.pool.flash_maxsim",
    "vllm_kvcompress.vllm_plugin.worker_side.attention.cpu",
)

for name in MODULES:
    import_module(name)
for module in walk_packages(policies.__path__, f"{policies.__name__}."):
    import_module(module.name)
entry_points()
configure_logging(LoggingConfig())
CpuPlatform.register_triton_kernel_overrides()
# The engines ask for it again, which would look through all names once more and replace nothing.
CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
