"""Needle recall of the reference model through real servers: the full cache, and a quarter."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.cli.server_process import OUR_SERVE, ROOT, serving
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.reference.evaluate import HELD_OUT_SEED
from vllm_kvcompress.tools.reference.tasks import FAMILIES, Sample, generate_sample, score

MODEL = ROOT / "models" / "reference"
QUESTIONS = 10  # of each family
CONTEXT_TOKENS = 1024
QUARTER = ["--kv-policy", "adakv+criticalkv", "--kv-budget", "0.25"]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [
        generate_sample(family, CONTEXT_TOKENS, HELD_OUT_SEED + seed)
        for family in FAMILIES
        for seed in range(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A stock server and a compressed one, side by side."""
    folder = tmp_path_factory.mktemp("recall")
    common = ["serve", str(MODEL), "--served-model-name", "reference", "--enforce-eager"]
    common += ["--dtype", fast_dtype()]
    with (
        serving(OUR_SERVE, [*common, "--kv-policy", "none"], folder / "full.log") as full,
        serving(OUR_SERVE, [*common, *QUARTER], folder / "quarter.log") as quarter,
    ):
        yield {"full": full, "quarter": quarter}


def ask(address: str, samples: list[Sample]) -> dict[str, float]:
    """Mean score by family, all questions asked in plain words through the chat API."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

        def reply(sample: Sample) -> float:
            answer = client.chat.completions.create(
                model="reference",
                messages=[{"role": "user", "content": f"{sample.context}\n{sample.question}"}],
                temperature=0,
                max_tokens=16,
            )
            return score(sample, answer.choices[0].message.content or "")

        with ThreadPoolExecutor(8) as pool:
            scores = list(pool.map(reply, samples))
    means = {
        family: sum(s for sample, s in zip(samples, scores, strict=True) if sample.family == family)
        / QUESTIONS
        for family in FAMILIES
    }
    return means | {"mean": sum(means.values()) / len(FAMILIES)}


def test_a_quarter_of_the_cache_answers_nearly_as_well(
    addresses: dict[str, str], samples: list[Sample]
) -> None:
    """Question-aware: the question is part of the prompt that is compressed."""
    full, quarter = (ask(addresses[name], samples) for name in ("full", "quarter"))
    print(f"full {full}\nquarter {quarter}")
    assert full["mean"] >= 0.95, full
    assert quarter["mean"] >= 0.9 * full["mean"], (full, quarter)
