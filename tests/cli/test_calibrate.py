"""Calibrates the reference model, and serves what may be promised then."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import urllib3

from tests.cli.server_process import OUR_SERVE, ROOT, serving
from tests.cli.test_status_page import declared_plugins
from training.tasks import generate_sample
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.calibration.measure import own_texts, user_texts
from vllm_kvcompress.tools.calibration.record import Calibration
from vllm_kvcompress.tools.evaluation import texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer

MODEL = str(ROOT / "models" / "reference")
LENGTH, CONTINUATION, NUM_TEXTS = 320, 32, 4
SIZES = ["--length", str(LENGTH), "--continuation", str(CONTINUATION)]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the tasks that the model was trained on, and one that is too short."""
    path = tmp_path_factory.mktemp("traffic") / "chats.jsonl"
    samples = [generate_sample("multikey", 400, seed) for seed in range(NUM_TEXTS)]
    lines = [{"text": f"{sample.context}\n{sample.question}"} for sample in samples]
    lines.insert(3, {"text": "too short"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, traffic: Path) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "losses.json"
    arguments = ["calibrate", MODEL, "--kv-policy", "streamingllm", "--data", str(traffic), *SIZES]
    arguments += ["--budgets", "0.5,0.25", "--engine", "dtype=float32", "--out", str(path)]
    arguments += ["--engine", "enforce_eager=true", "--engine", "max_model_len=512"]
    assert main(arguments) == 0
    return path


def test_every_text_has_a_loss_at_every_budget(calibrated: Path) -> None:
    found = Calibration.read(calibrated)
    assert found.budgets == (0.25, 0.5)
    assert (found.model, found.policy, found.lengths) == (MODEL, "streamingllm", (LENGTH,))
    assert [text.calibrates for text in found.texts] == [True, False] * (NUM_TEXTS // 2)
    assert {text.kind for text in found.texts} == {"chats"}
    for quarter, half in (text.losses for text in found.texts):
        assert 0 != quarter != half != 0
    assert list(calibrated.parent.iterdir()) == [calibrated]


def test_a_server_says_what_is_promised(calibrated: Path, tmp_path: Path) -> None:
    found = Calibration.read(calibrated)
    limit = found.rungs()[0].bound  # at a half; a quarter may do, too
    budget = found.by_length(limit)[LENGTH]
    assert budget in (0.25, 0.5)
    options = [MODEL, "--kv-policy", "streamingllm", "--kv-budget", f"loss:{limit}"]
    options += ["--kv-calibration", str(calibrated), "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "512", "--kv-shadow", "1.0"]
    promise = f"{budget:g} of each prompt (promised to lose at most {limit:g} nats per token, by"
    log, packages = tmp_path / "server.log", declared_plugins(tmp_path / "packages")
    with serving(OUR_SERVE, ["serve", *options], log, packages=packages) as address:
        metrics = urllib3.request("GET", f"{address}/metrics").data.decode()
        assert f'budget="{budget}"' in metrics
        (line,) = (each for each in metrics.splitlines() if "kvcompress_promised_loss{" in each)
        assert float(line.rpartition(" ")[2]) == pytest.approx(limit)
        status = urllib3.request("GET", f"{address}/kvcompress/status").json()
        assert status["settings"]["promised_loss"] == pytest.approx(limit)
        assert status["settings"]["min_tokens"] == LENGTH
    assert promise in log.read_text()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--budgets", "0.5,1.0"], "expected fractions of the prompt above 0 and below 1"),
        (["--budgets", "loss:0.1"], "expected fractions of the prompt"),
        (["--continuation", "1"], "--continuation at least 2"),
        (["--cap", "0"], "--cap: expected more than 0"),
        (["--kv-policy", "none"], "expected a policy"),
        (["--length", "1k"], "--length 1k: expected numbers of tokens, such as 1024,4096"),
        (["--length", "4096"], "expected texts of at least 4224 tokens.*found 5 shorter"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    traffic: Path,
    tmp_path: Path,
    more: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["calibrate", MODEL, "--data", str(traffic), "--out", str(tmp_path / "c.json")]
    assert main([*arguments, *more]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(sentence, message)


def test_lines_without_a_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"line 2: expected a JSON object with a text"):
        user_texts(path, [LENGTH], CONTINUATION, load_tokenizer(MODEL))


def test_a_line_is_of_the_longest_length_that_it_has(tmp_path: Path) -> None:
    """A length that no line has is refused."""
    path, tokenizer = tmp_path / "traffic.jsonl", load_tokenizer(MODEL)
    words = ["a", "b"] * 200
    counts = [40, 150, 400, 99]
    path.write_text("".join(json.dumps({"text": " ".join(words[:n])}) + "\n" for n in counts))
    sizes = [len(tokenizer(" ".join(words[:n]))["input_ids"]) for n in counts]
    lengths = [sizes[3] - CONTINUATION, sizes[2] - CONTINUATION]
    items = user_texts(path, lengths, CONTINUATION, tokenizer)
    expected = {sizes[1]: lengths[0], sizes[2]: lengths[1], sizes[3]: lengths[0]}
    found = {len(tokenizer(item.context)["input_ids"]): item.length for item in items}
    assert found == expected
    with pytest.raises(ConfigError, match="found 4 shorter or longer ones"):
        user_texts(path, [lengths[1] + 1], CONTINUATION, tokenizer)


def test_own_texts_are_of_different_documents() -> None:
    """Every kind has its share, always the same, and no text is there twice."""
    items = own_texts([256], 64, 6, lambda text: {"input_ids": text.split(" ")})
    assert {item.task for item in items} == set(texts.KINDS)
    for kind in texts.KINDS:
        own = [item.context for item in items if item.task == kind]
        assert len(own) == len(set(own)) == 6
    again = own_texts([256], 64, 6, lambda text: {"input_ids": text.split(" ")})
    assert items == again
