"""Decides which servers capture whole decode steps in CUDA graphs, and says why others do not."""

from __future__ import annotations

from vllm.config import VllmConfig

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.config import has_latents, uses_alibi
from vllm_kvcompress.vllm_plugin.compat.relative import relative_extent
from vllm_kvcompress.vllm_plugin.startup.layer_refusals import caps_logits, num_sharing_layers
from vllm_kvcompress.vllm_plugin.startup.quantized import is_quantized


def reason_for_pieces(vllm_config: VllmConfig, settings: Settings) -> str | None:
    """Returns why CUDA graphs are piecewise, without attention; None: they are full.

    A replay runs no Python and repeats the launches of start-up. Only this package's kernels
    allow that: --kv-attention own asks for them, and auto picks them if graphs can be full.
    """
    if settings.attention not in ("auto", "own"):
        return f"--kv-attention {settings.attention} uses vLLM's kernels"
    if not vllm_config.use_v2_model_runner:
        return "full graphs were not tried with model runner V1"
    if vllm_config.speculative_config is not None:
        return "speculative decoding has several tokens per request in a step"
    return _reason_against_own(vllm_config, settings) if settings.attention == "auto" else None


def _reason_against_own(vllm_config: VllmConfig, settings: Settings) -> str | None:
    """Returns why `auto` picks vLLM's kernels; with `own` most of these are refused at start-up."""
    if not vllm_config.compilation_config.cudagraph_mode.decode_mode().has_full_cudagraphs():
        return "vLLM was told to capture no whole decode steps"
    if has_latents(vllm_config.model_config):
        return "this package's kernels do not read latent rows"
    if settings.read is not None:
        return "with --kv-read every step chooses other pages"
    if is_quantized(vllm_config):
        return "this package's kernels do not read quantized caches"
    if num_sharing_layers(vllm_config.model_config):
        return "graphs do not record queries of layers that read other layers' caches"
    if uses_alibi(vllm_config.model_config) or relative_extent(vllm_config.model_config):
        return "this package's kernels add no biases by distance, as the model does"
    if caps_logits(vllm_config.model_config):
        return "this package's kernels do not cap attention logits, as the model does"
    return None
