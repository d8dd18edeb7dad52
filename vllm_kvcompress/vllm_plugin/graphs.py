"""Which servers have whole decode steps in CUDA graphs, and why others have not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_kvcompress.config import Settings
from vllm_kvcompress.policies import Pipeline

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def reason_for_pieces(
    vllm_config: VllmConfig, settings: Settings, pipelines: Iterable[Pipeline]
) -> str | None:
    """Why attention runs between piecewise graphs; None: whole decode steps are captured.

    A replay runs no Python, and launches what was launched at start-up. (With --kv-read every step
    chooses pages anew; it is refused with --kv-attention own.)
    """
    if settings.attention != "own":
        return "vLLM's kernels attend for compressed requests; --kv-attention own has them"
    if not vllm_config.use_v2_model_runner:
        return "with model runner V1 that was not tried"
    if vllm_config.speculative_config is not None:
        return "steps of speculative decoding have several tokens per request"
    for pipeline in pipelines:
        if pipeline.needs_biased_attention:
            return f"attention takes more than keys and values with {pipeline.name}"
    return None
