"""A compressed server of a model with linear attention, with prefix caching as stock has it."""

from __future__ import annotations

from pathlib import Path

import openai

from tests import tiny_models
from tests.cli.server_process import OUR_SERVE, serving
from tests.cli.test_server_metrics import scraped

PROMPT_TOKENS, WINDOW, BLOCK = 1000, 32, 96


def test_a_repeated_prompt_hits_the_prefix_cache_of_a_qwen3_next(tmp_path: Path) -> None:
    """All blocks before the window's queries, with their states; both answers have an event."""
    model = tiny_models.build("qwen3_next", tmp_path)
    arguments = ["serve", str(model), "--served-model-name", "tiny", "--max-model-len", "2048"]
    arguments += ["--dtype", "bfloat16", "--enforce-eager", "--mamba-ssm-cache-dtype", "bfloat16"]
    arguments += ["--kv-policy", "adakv", "--kv-budget", "0.25", "--enable-prompt-tokens-details"]
    prompt = tiny_models.prompt(PROMPT_TOKENS, seed=1)
    with serving(OUR_SERVE, arguments, tmp_path / "server.log") as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            first, second = (
                client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
                for _ in range(2)
            )
        metrics = scraped(address)
    hits = [answer.usage and answer.usage.prompt_tokens_details for answer in (first, second)]
    cached = [details.cached_tokens if details else 0 for details in hits]
    assert cached == [0, (PROMPT_TOKENS - WINDOW) // BLOCK * BLOCK]
    assert second.choices[0].text == first.choices[0].text
    assert metrics["kvcompress_events_total"] == 2
    assert metrics["kvcompress_blocks_freed_total"] == 2 * (PROMPT_TOKENS // BLOCK)
    assert metrics["kvcompress_blocks_written_total"] == 2 * 3
