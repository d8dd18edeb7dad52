"""/metrics of real servers, fed by a scheduler that reports one event per request."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from tests import tiny_models
from tests.cli.server_process import PLAIN_VLLM, serving

OUR_LAUNCH = "import sys; from vllm_kvcompress.cli import launch; launch.serve(sys.argv[1:])"
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"))


def scraped(address: str) -> dict[str, float]:
    """Our samples by name, or by name{reason}, over all policies; and by name{policy}."""
    text = urllib3.request("GET", f"{address}/metrics").data.decode()
    samples: dict[str, float] = {}
    seen = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvcompress_") and "le" not in sample.labels:
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
                assert "pid" not in sample.labels
                reason = sample.labels.get("reason", "")
                policy = sample.labels.get("policy", "")
                assert (sample.name, *sample.labels.items()) not in seen
                seen.add((sample.name, *sample.labels.items()))
                key = f"{sample.name}{{{reason}}}" if reason else sample.name
                for name in (key, f"{sample.name}{{{policy}}}"):
                    samples[name] = samples.get(name, 0) + sample.value
    return samples


@pytest.mark.parametrize(
    ("code", "num_api_servers"),
    [(OUR_LAUNCH, 1), (OUR_LAUNCH, 2), (PLAIN_VLLM, 1)],
    ids=["one API server", "two API servers", "plain vllm serve"],
)
def test_metrics_count_every_event_once(
    model: Path, tmp_path: Path, code: str, num_api_servers: int
) -> None:
    arguments = ["serve", str(model), "--served-model-name", "tiny", "--enforce-eager"]
    arguments += ["--max-model-len", "256", "--dtype", "float32", "--block-size", "32"]
    arguments += ["--api-server-count", str(num_api_servers)]
    arguments += ["--scheduler-cls", "tests.cli.reporting_scheduler.ReportingScheduler"]
    arguments += ["--additional-config", '{"kvcompress": {"policy": "snapkv", "budget": 0.25}}']
    with serving(code, arguments, tmp_path / "server.log") as address:
        before = scraped(address)
        assert before["kvcompress_info"] == 1
        assert before["kvcompress_events_total"] == 0
        assert before["kvcompress_compression_ratio"] == 1
        for index in range(NUM_REQUESTS):
            # A connection each, so that several API servers share them.
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
                prompt = tiny_models.prompt(40, seed=index)
                client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
        deadline = time.monotonic() + 20
        after = scraped(address)
        while after["kvcompress_compression_ratio"] != 1 and time.monotonic() < deadline:
            time.sleep(0.2)
            after = scraped(address)
    assert after["kvcompress_compression_ratio"] == 1
    assert after["kvcompress_events_total"] == NUM_REQUESTS
    assert after["kvcompress_source_tokens_total"] == 128 * NUM_REQUESTS
    assert after["kvcompress_resident_tokens_total"] == 32 * NUM_REQUESTS
    assert after["kvcompress_blocks_freed_total"] == 4 * NUM_REQUESTS
    assert after["kvcompress_blocks_written_total"] == NUM_REQUESTS
    assert after["kvcompress_skipped_total{nothing_to_free}"] == NUM_REQUESTS
    assert after["kvcompress_kept_fraction_sum"] == 0.25 * NUM_REQUESTS
    assert after["kvcompress_event_seconds_count"] == NUM_REQUESTS
