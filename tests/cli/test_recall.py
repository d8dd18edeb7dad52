"""Needle recall of the reference model through a real server: the full cache, and a quarter."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.server_process import OUR_SERVE, ROOT, serving
from training.evaluate import HELD_OUT_SEED
from training.tasks import FAMILIES, Sample, generate_sample
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation.metrics import contains_all

MODEL = ROOT / "models" / "reference"
QUESTIONS = 10  # of each family
CONTEXT_TOKENS = 1024
QUARTER = ["--kv-policy", "adakv+criticalkv", "--kv-budget", "0.25"]
WHOLE = {"vllm_xargs": {"kv_policy": "none"}}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [
        generate_sample(family, CONTEXT_TOKENS, HELD_OUT_SEED + seed)
        for family in FAMILIES
        for seed in range(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that compresses unless a request asks for the full cache."""
    arguments = ["serve", str(MODEL), "--served-model-name", "reference", "--enforce-eager"]
    arguments += ["--dtype", fast_dtype(), *QUARTER, "--kv-allow-request-policies", "none"]
    log = tmp_path_factory.mktemp("recall") / "server.log"
    with serving(OUR_SERVE, arguments, log) as address:
        yield address


def ask(address: str, samples: list[Sample], more: dict[str, object]) -> dict[str, float]:
    """Returns the mean score by family; questions go through the chat API."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

        def reply(sample: Sample) -> float:
            answer = client.chat.completions.create(
                model="reference",
                messages=[{"role": "user", "content": f"{sample.context}\n{sample.question}"}],
                temperature=0,
                max_tokens=16,
                extra_body=more,
            )
            return contains_all(answer.choices[0].message.content or "", sample.answers)

        with ThreadPoolExecutor(8) as pool:
            scores = list(pool.map(reply, samples))
    means = {
        family: sum(s for sample, s in zip(samples, scores, strict=True) if sample.family == family)
        / QUESTIONS
        for family in FAMILIES
    }
    return means | {"mean": sum(means.values()) / len(FAMILIES)}


def counters(address: str) -> dict[str, float]:
    """Returns the server's counters by name, over all labels."""
    text = urllib3.request("GET", f"{address}/metrics").data.decode()
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counts[sample.name] += sample.value
    return counts


def test_the_tour_shows_what_a_server_replies(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code in docs/get-started.md prints the line below it, and moves counters as shown."""
    tour = (ROOT / "docs" / "get-started.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n    (.*?)\n", tour, re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    shown = re.findall(r"^    ((?:kvcompress|vllm:)\w+)\{.*\} ([0-9.]+)$", tour, re.MULTILINE)
    assert len(shown) == 6
    assert "http://127.0.0.1:8000" in code
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.path", list(sys.path))
    before = counters(address)
    for _ in range(2):
        exec(code.replace("http://127.0.0.1:8000", address), {})
    assert capsys.readouterr().out == f"{printed}\n" * 2
    after = counters(address)
    gained = {name: after[name] - before[name] for name, _ in shown}
    assert gained == {name: float(value) for name, value in shown}


def test_quarter_of_the_cache_recalls_nearly_as_much(address: str, samples: list[Sample]) -> None:
    """Question-aware: the question is part of the prompt that is compressed."""
    full, quarter = (ask(address, samples, more) for more in (WHOLE, {}))
    print(f"full {full}\nquarter {quarter}")
    assert full["mean"] >= 0.95, full
    assert quarter["mean"] >= 0.9 * full["mean"], (full, quarter)
