"""A real server measures heads once, and says where they come from."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import urllib3
from vllm import envs

from tests import tiny_models
from tests.cli.server_process import OUR_SERVE, serving


def test_server_measures_heads_at_its_first_start_alone(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architectures = Path(envs.VLLM_CACHE_ROOT) / "modelinfos"  # take vLLM long to find out
    architectures.mkdir(parents=True, exist_ok=True)
    (tmp_path / "modelinfos").symlink_to(architectures)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    arguments = ["serve", llama, "--kv-policy", "auto", "--kv-budget", "0.25"]
    arguments += ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "1024"]
    arguments += ["--dtype", "float32"]
    answers = []
    for source in ("measured now", "cache"):
        log = tmp_path / "server.log"
        with serving(OUR_SERVE, arguments, log) as address:
            metrics = urllib3.request("GET", f"{address}/metrics").data.decode()
            (line,) = (each for each in metrics.splitlines() if "kvcompress_heads_info{" in each)
            assert f'source="{source}"' in line
            assert line.endswith(" 1.0")
            status = urllib3.request("GET", f"{address}/kvcompress/status").json()
            assert status["measured_heads"] == {"0": source}
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
                asked = tiny_models.prompt(600, seed=1)
                reply = client.completions.create(model="tiny", prompt=asked, max_tokens=64)
                answers.append(reply.choices[0].text)
        assert ("Measured 4 heads of 3 layers" in log.read_text()) == (source == "measured now")
    assert answers[0] == answers[1]
