"""Which servers have whole decode steps in CUDA graphs, and why others have not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvcompress.config import Settings
from vllm_kvcompress.vllm_plugin.startup.layer_refusals import caps_logits
from vllm_kvcompress.vllm_plugin.startup.quantized import is_fp8

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def reason_for_pieces(vllm_config: VllmConfig, settings: Settings) -> str | None:
    """Why attention is no part of CUDA graphs; None: whole decode steps are captured.

    A replay runs no Python, and launches what was launched at start-up: this package's kernels,
    which --kv-attention own asks for, and auto takes where such graphs are to be had.
    """
    if settings.attention not in ("auto", "own"):
        return f"--kv-attention {settings.attention} has vLLM's kernels attend"
    if not vllm_config.use_v2_model_runner:
        return "with model runner V1 that was not tried"
    if vllm_config.speculative_config is not None:
        return "steps of speculative decoding have several tokens per request"
    return _reason_against_own(vllm_config, settings) if settings.attention == "auto" else None


def _reason_against_own(vllm_config: VllmConfig, settings: Settings) -> str | None:
    """Why `auto` leaves attention to vLLM's kernels, though graphs could be of whole steps.

    Most of these refuse --kv-attention own, which is not what somebody asked for here.
    """
    if not vllm_config.compilation_config.cudagraph_mode.decode_mode().has_full_cudagraphs():
        return "vLLM is not to capture whole decode steps"
    if settings.read is not None:
        return "with --kv-read every step chooses pages anew"
    if is_fp8(vllm_config):
        return "this package's kernels read caches of the model's type alone"
    if caps_logits(vllm_config.model_config):
        return "the model caps its attention logits, which this package's kernels do not"
    return None
