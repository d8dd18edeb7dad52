"""/metrics of real servers: every event is counted once, however they were started."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from tests import tiny_models
from tests.cli.server_process import PLAIN_VLLM, plain_arguments, serving
from vllm_kvcompress.cli.main import main

NUM_REQUESTS = 12
PROMPT_TOKENS, SHORT = 170, 40
FULL_BLOCKS = PROMPT_TOKENS // 32
KEPT_BLOCKS = -(-FULL_BLOCKS // 2)  # half, which is the default


def scraped(address: str, engine: str = "0") -> dict[str, float]:
    """Returns an engine's samples by name, by name{reason} and by name{policy}."""
    text = urllib3.request("GET", f"{address}/metrics").data.decode()
    samples: dict[str, float] = {}
    seen = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            ours = sample.name.startswith("kvcompress_") and sample.labels["engine"] == engine
            if ours and "le" not in sample.labels:
                assert sample.labels["model_name"] == "tiny"
                assert "pid" not in sample.labels
                reason = sample.labels.get("reason", "")
                policy = sample.labels.get("policy", "")
                assert (sample.name, *sample.labels.items()) not in seen
                seen.add((sample.name, *sample.labels.items()))
                key = f"{sample.name}{{{reason}}}" if reason else sample.name
                for name in (key, f"{sample.name}{{{policy}}}"):
                    samples[name] = samples.get(name, 0) + sample.value
    return samples


def test_metrics_count_every_event_once(
    llama: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Plain `vllm serve` with the printed command; `serve` itself is covered in
    test_server.py, and of several API servers in test_status_page.py."""
    arguments = ["serve", llama, "--kv-policy", "snapkv", "--kv-min-tokens", "64"]
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # --print-vllm-command would lower it
    assert main([*arguments, "--print-vllm-command"]) == 0
    arguments = plain_arguments(capsys.readouterr().out)
    arguments += ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--dtype", "float32"]
    log = tmp_path / "server.log"
    with serving(PLAIN_VLLM, arguments, log, fresh=True) as address:
        before = scraped(address)
        assert before["kvcompress_info"] == 1
        assert before["kvcompress_events_total"] == 0
        assert before["kvcompress_compression_ratio"] == 1
        for index in range(NUM_REQUESTS):
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
                for num_tokens in (PROMPT_TOKENS, SHORT):
                    prompt = tiny_models.prompt(num_tokens, seed=index)
                    client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
        deadline = time.monotonic() + 300
        after = scraped(address)
        while not settled(after) and time.monotonic() < deadline:
            time.sleep(0.2)
            after = scraped(address)
    assert after["kvcompress_compression_ratio"] == 1
    assert after["kvcompress_events_total"] == NUM_REQUESTS
    assert after["kvcompress_source_tokens_total"] == 32 * FULL_BLOCKS * NUM_REQUESTS
    assert after["kvcompress_kept_tokens_total"] == 32 * KEPT_BLOCKS * NUM_REQUESTS
    assert after["kvcompress_blocks_freed_total"] == FULL_BLOCKS * NUM_REQUESTS
    assert after["kvcompress_blocks_written_total"] == KEPT_BLOCKS * NUM_REQUESTS
    assert after["kvcompress_skipped_total{shorter_than_min_tokens}"] == NUM_REQUESTS
    kept = KEPT_BLOCKS / FULL_BLOCKS * NUM_REQUESTS
    assert after["kvcompress_kept_fraction_sum"] == pytest.approx(kept)
    assert after["kvcompress_event_seconds_count"] == NUM_REQUESTS
    assert "budget 0.5 of each prompt (the default; --kv-budget" in log.read_text()


def settled(samples: dict[str, float]) -> bool:
    """Returns whether the last request has ended and its event is in the metrics."""
    return (
        samples["kvcompress_compression_ratio"] == 1
        and samples["kvcompress_event_seconds_count"] == NUM_REQUESTS
    )
