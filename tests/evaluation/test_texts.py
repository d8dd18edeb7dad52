"""How well what follows a compressed text is predicted: which texts, the measure, and its rows."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

import stand_in
from offline.blockwise import BlockwiseModel
from offline.masked import MaskedModel
from tests.cli.server_process import OUR_SERVE, ROOT, serving
from tests.evaluation.test_eval import read
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.cli.recommend import cheapest
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.triattention import write_statistics
from vllm_kvcompress.scheduling.rule import PolicyDemand
from vllm_kvcompress.tools.evaluation import runner, texts
from vllm_kvcompress.tools.evaluation.engine import Engine, Question, mean_nats
from vllm_kvcompress.tools.evaluation.items import load_text, load_texts
from vllm_kvcompress.tools.evaluation.prompts import split_prompt
from vllm_kvcompress.tools.evaluation.report import html_report
from vllm_kvcompress.tools.evaluation.setups import FULL, TEXT, Setup, shared_engines
from vllm_kvcompress.tools.evaluation.summary import interval, markdown_table, summarize, text_table

MODEL = str(ROOT / "models" / "reference")
ENGINE = ["--engine", "enforce_eager=true", "--engine", "max_model_len=1024"]
ENGINE += ["--engine", "dtype=float32"]
CONTEXT, CONTINUATION = 300, 20


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that the reference model knows, in an order that it cannot."""
    path = tmp_path_factory.mktemp("texts") / "mine.txt"
    words = [f"{'kvw'[place % 3]}{place * 7 % 30}" for place in range(1000)]
    path.write_text(" ".join(words))
    return path


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predicted")
    started: list[str] = []

    class Noted(Engine):
        def __init__(self, model: str, settings: Any, *more: Any) -> None:
            started.append("stock" if settings is None else settings["policy"])
            super().__init__(model, settings, *more)

    arguments = ["eval", MODEL, "--data", str(text), "--samples", "1", "--budgets", "0.25,0.5"]
    arguments += ["--lengths", str(CONTEXT), "--continuation", str(CONTINUATION), *ENGINE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Engine", Noted)
        assert main([*arguments, "--policies", "snapkv,h2o", "--out", str(folder)]) == 0
    assert started == ["stock", "snapkv"], "h2o is asked for request by request"
    return folder


def predicted_tokens(
    text: Path, context: int = CONTEXT, continuation: int = CONTINUATION
) -> tuple[list[int], list[int]]:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(MODEL)(text.read_text())["input_ids"]
    return tokens[:context], tokens[context : context + continuation]


def test_the_full_cache_predicts_as_the_model_does(finished: Path, text: Path) -> None:
    """Against Hugging Face's implementation, token by token."""
    from transformers import AutoModelForCausalLM

    context, continuation = predicted_tokens(text)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0]
    total = 0.0
    for place in range(1, CONTINUATION):
        chances = torch.softmax(logits[CONTEXT + place - 1].double(), dim=0)
        total -= math.log(chances[continuation[place]])
    rows, _ = read(finished)
    assert rows["full/text"]["nats"] == pytest.approx(total / (CONTINUATION - 1), abs=1e-4)


def test_one_engine_serves_every_setting_as_its_own_would(finished: Path, text: Path) -> None:
    """Policies and budgets that requests choose predict what an engine of their own does."""
    rows, _ = read(finished)
    assert set(rows) == {
        "full/text",
        *(f"{policy}@{budget}/text" for policy in ("snapkv", "h2o") for budget in (0.25, 0.5)),
    }
    context, continuation = predicted_tokens(text)
    question = Question(context, continuation, 1, agnostic=True, predicted=True)
    options = {"enforce_eager": True, "max_model_len": 1024, "dtype": "float32"}
    settings = {"policy": "h2o", "budget": 0.25}
    with Engine(MODEL, settings, options, finished / "alone.log") as engine:
        (reply,) = engine.ask(question)
    assert reply.nats == pytest.approx(rows["h2o@0.25/text"]["nats"], abs=1e-5)
    assert reply.resident_tokens == -(-(CONTEXT // 32) // 4) * 32 + CONTEXT % 32 + CONTINUATION
    losses = [row["loss"] for name, row in rows.items() if not name.startswith("full")]
    assert all(abs(loss) > 1e-4 for loss in losses)
    assert len({round(loss, 6) for loss in losses}) == 4


def test_a_server_predicts_like_an_engine(finished: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["serve", MODEL, "--served-model-name", "reference", "--enforce-eager"]
    arguments += ["--dtype", "float32", "--kv-policy", "snapkv", "--kv-budget", "0.5"]
    asked = ["eval", MODEL, "--data", str(text), "--samples", "1", "--lengths", str(CONTEXT)]
    asked += ["--continuation", str(CONTINUATION), "--served-name", "reference"]
    with serving(OUR_SERVE, arguments, tmp_path / "server.log") as address:
        assert main([*asked, "--base-url", address, "--out", str(tmp_path / "out")]) == 0
    rows, (answer,) = read(tmp_path / "out")
    expected = read(finished)[0]["snapkv@0.5/text"]
    assert rows["server/text"]["nats"] == pytest.approx(expected["nats"], abs=1e-4)
    assert rows["server/text"]["loss"] is None
    assert answer["resident_tokens"] == pytest.approx(expected["kept"] * (CONTEXT + CONTINUATION))


def test_a_stand_in_predicts_like_an_engine(finished: Path, text: Path) -> None:
    """The same tokens are kept, the partial last block's too, and the others masked."""
    model = MaskedModel(MODEL, torch.float32)
    names = ["full", "snapkv@0.25", "h2o@0.25", "snapkv@0.5"]
    found = stand_in.text_loss(model, predicted_tokens(text), names)
    rows, _ = read(finished)
    assert found["full"] == pytest.approx(rows["full/text"]["nats"], abs=1e-4)
    for name in names[1:]:
        assert found[name] == pytest.approx(rows[f"{name}/text"]["nats"], abs=1e-4), name


def test_a_stand_in_divides_pages_among_layers_as_an_engine_does(
    text: Path, tmp_path: Path
) -> None:
    """By measured heads, of which the first layer's matter most, and by PyramidKV's slope."""
    context, continuation = predicted_tokens(text)
    profile, shape = tmp_path / "heads.json", json.loads((Path(MODEL) / "config.json").read_text())
    heads = product(range(shape["num_hidden_layers"]), range(shape["num_attention_heads"]))
    scores = {f"{layer}-{head}": [0.4**layer + 0.1 * head] for layer, head in heads}
    profile.write_text(json.dumps(scores))
    setups = {
        "h2o+headkv": f"h2o+headkv:profile={profile}@0.25",
        "pyramidkv": "pyramidkv@0.25",
        "h2o": "h2o@0.25",
    }
    model = MaskedModel(MODEL, torch.float32)
    found = stand_in.text_loss(model, (context, continuation), list(setups.values()))
    settings = {"policy": "h2o+headkv", "budget": 0.25, "profile": str(profile), "min_tokens": 0}
    settings["request_policies"] = ["pyramidkv", "h2o"]
    options = {"enforce_eager": True, "max_model_len": 1024, "dtype": "float32"}
    with Engine(MODEL, settings, options, tmp_path / "engine.log") as engine:
        for policy, setup in setups.items():
            (reply,) = engine.ask(
                Question(context, continuation, 1, agnostic=True, predicted=True, policy=policy)
            )
            assert found[setup] == pytest.approx(reply.nats, abs=1e-4), policy
    assert len({round(nats, 3) for nats in found.values()}) == 3


def test_a_stand_in_merges_and_leaves_corrections_to_engines(text: Path) -> None:
    """Where D2O merges nothing it is what it chooses; its theta is for a second event."""
    model = MaskedModel(MODEL, torch.float32)
    names = ["h2o@0.25", "d2o:num_sinks=0,skip_layers=9@0.25", "d2o@0.25"]
    h2o, alike, d2o = stand_in.text_loss(model, predicted_tokens(text), names).values()
    assert alike == h2o != d2o
    with pytest.raises(NotImplementedError, match="need an engine"):
        stand_in.text_loss(model, predicted_tokens(text), ["momentkv@0.5"])


def test_a_stand_in_compresses_on_the_way_as_an_engine_does(text: Path, tmp_path: Path) -> None:
    """In chunks, and again while the continuation is read; its last event is behind the context.

    Heads and layers of some policies keep more than others.
    """
    context, continuation = predicted_tokens(text, 270, 100)
    tokens = [*context, *continuation]
    chosen = {"budget": 0.25, "trigger": "chunk:64,decode:32", "min_tokens": 0}
    policies = ["tova", "snapkv", "keydiff", "adakv", "pyramidkv", "rkv"]
    settings = {"policy": "tova", "request_policies": policies[1:], **chosen}
    options = {"enforce_eager": True, "max_model_len": 1024, "dtype": "float32"}
    model = BlockwiseModel(MODEL, torch.float32)
    with Engine(MODEL, settings, options, tmp_path / "engine.log") as engine:
        for policy in policies:
            question = Question(
                tokens[:270], tokens[270:], 1, agnostic=True, predicted=True, policy=policy
            )
            (reply,) = engine.ask(question)
            pipeline = resolve(policy)
            rule = Settings.from_dict({**chosen, "policy": policy}).rule(
                32, PolicyDemand(window_size=pipeline.needs.window_size)
            )
            found = model.nats(tokens, 270, pipeline, rule)
            assert found == pytest.approx(reply.nats, abs=1e-4), policy


def test_a_stand_in_scores_by_measured_queries_as_an_engine_does(
    text: Path, tmp_path: Path
) -> None:
    """By the position that the request has reached, event after event."""
    profile, (context, continuation) = tmp_path / "queries.pt", predicted_tokens(text, 270, 100)
    mean = torch.randn(4, 8, 2, 16, generator=torch.Generator().manual_seed(3))
    write_statistics(profile, torch.cat([mean, 1 + mean.norm(dim=2, keepdim=True)], dim=2))
    chosen = {"budget": 0.25, "trigger": "chunk:64,decode:32", "min_tokens": 0}
    chosen |= {"policy": "triattention", "profile": str(profile)}
    question = Question(context, continuation, 1, agnostic=True, predicted=True)
    options = {"enforce_eager": True, "max_model_len": 1024, "dtype": "float32"}
    with Engine(MODEL, chosen, options, tmp_path / "engine.log") as engine:
        (reply,) = engine.ask(question)
    pipeline, rule = resolve("triattention", {}, profile), Settings.from_dict(chosen)
    model = BlockwiseModel(MODEL, torch.float32)
    found = model.nats([*context, *continuation], 270, pipeline, rule.rule(32, PolicyDemand()))
    assert found == pytest.approx(reply.nats, abs=1e-4)


def test_the_first_token_behind_the_context_does_not_count() -> None:
    question = Question([1, 2, 3], [4, 5, 6], 1, agnostic=True, predicted=True)
    said = [{}, {2: -1.0}, {3: -1.0}, {4: -100.0}, {5: -2.0, 9: -0.1}, {6: -4.0}]
    assert mean_nats(said, question) == 3.0


def test_setups_share_engines_where_they_can() -> None:
    setups = [Setup(FULL), Setup("snapkv", 0.25), Setup("momentkv", 0.5), Setup("h2o", 0.5)]
    setups += [Setup("momentkv", 0.25), Setup("snapkv", 100), Setup("snapkv", 0.5, "quest:0.5")]
    engines = shared_engines(setups, {})
    assert [[setup.name for setup in engine.setups] for engine in engines] == [
        ["full"],
        ["snapkv@0.25", "h2o@0.5"],
        ["momentkv@0.5", "momentkv@0.25"],
        ["snapkv@100"],
        ["snapkv@0.5 quest:0.5"],
    ]
    assert engines[0].settings is None
    assert engines[1].settings == {
        "policy": "snapkv",
        "budget": 0.25,
        "request_policies": ["h2o"],
        "min_request_budget": 0.25,
        "max_request_budget": 0.5,
    }
    assert engines[1].choice(setups[3]) == {"policy": "h2o", "budget": 0.5}
    assert engines[3].choice(setups[5]) == {}
    own = shared_engines(setups[1:4:2], {"params": {"window_size": 16}})
    assert len(own) == 2, "parameters are those of an engine's own policy"


@pytest.mark.parametrize("kind", texts.KINDS)
def test_pieces_do_not_overlap(kind: str) -> None:
    whole = "".join(texts.KINDS[kind]())
    first = texts.pieces(kind, 600, first=0, count=10)
    later = texts.pieces(kind, 600, first=10, count=10)
    places = sorted(whole.index(piece) for piece in first + later)
    lengths = {len(piece) for piece in first + later}
    assert lengths == {600 * texts.CHARACTERS_PER_TOKEN}
    assert min(b - a for a, b in pairwise(places)) >= lengths.pop()
    assert len(set(first + later)) == 20
    assert texts.pieces(kind, 600, first=0, count=10) == first


def test_texts_that_are_too_few_or_too_short_are_refused(text: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    with pytest.raises(ConfigError, match=r"text/manual has \d pieces"):
        load_texts("text/manual", [10_000], 100, num=50, seed=0)
    (item,) = load_text(text, [5_000], 100, num=3)
    with pytest.raises(ConfigError, match="mine: a text of 1000 tokens, expected at least 5100"):
        split_prompt(AutoTokenizer.from_pretrained(MODEL), item)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_text(tmp_path / "missing.txt", [10], 10, num=1)


def test_one_token_cannot_be_predicted(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", MODEL, "--data", str(text), "--continuation", "1", "--out", "unused"]
    assert main(arguments) == 2
    assert "--continuation: expected at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "quantile"), [(4, 3.182), (5, 2.776), (10, 2.262), (20, 2.093)])
def test_intervals_are_student_s(count: int, quantile: float) -> None:
    """Quantiles from a printed table."""
    values = [float(place % 3) for place in range(count)]
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    low, high = interval(values)
    assert high - mean == pytest.approx(mean - low)
    assert high - mean == pytest.approx(quantile * deviation / math.sqrt(count), rel=0.01)


def predictions() -> list[dict[str, Any]]:
    """Predictions of four texts of two kinds, at three setups."""
    found = []
    for setup, kept, loss in [(FULL, 1.0, 0.0), ("one@0.5", 0.5, 0.01), ("two@0.25", 0.25, 0.1)]:
        for item in range(4):
            found.append(
                {
                    "setup": setup,
                    "mode": TEXT,
                    "item": item,
                    "task": ("text/a", "text/b")[item // 2],
                    "length": 100,
                    "depth": None,
                    "score": None,
                    "nats": 2.0 + item + loss * (1 + item % 2),
                    "tokens": [1],
                    "prompt_tokens": 100,
                    "resident_tokens": 100 * kept,
                    "resident_bytes": 0,
                    "first_token_seconds": 0.01,
                    "token_seconds": 0.0,
                    "kept_tokens": [],
                }
            )
    return found


def test_losses_are_differences_to_the_full_cache() -> None:
    rows = {row["setup"]: row for row in summarize(predictions())}
    assert rows[FULL]["nats"] == 3.5
    two = rows["two@0.25"]
    assert two["loss"] == pytest.approx(0.15)
    assert two["tasks"] == {"text/a@100": pytest.approx(0.15), "text/b@100": pytest.approx(0.15)}
    assert two["loss_interval"] == pytest.approx(interval([0.1, 0.2, 0.1, 0.2]))
    assert two["score"] is None
    assert two["agreement"] is None


def test_losses_are_shown_everywhere() -> None:
    rows = summarize(predictions())
    assert markdown_table(rows).splitlines() == [
        "| setup | kept | text: loss, nats per token (95%) |",
        "|---|---|---|",
        "| `full` | 100.0% | (3.500 nats) |",
        "| `one@0.5` | 50.0% | 0.015 (0.006 to 0.024) |",
        "| `two@0.25` | 25.0% | 0.150 (0.059 to 0.241) |",
    ]
    assert text_table(rows).splitlines()[2].endswith("0.015 (0.006 to 0.024)")
    page = html_report("model", rows)
    assert "Loss on texts against kept tokens" in page
    assert page.count("<svg") == 3, "all texts, and each kind"
    assert "4 texts for every setting: text/a@100, text/b@100" in page
    assert "<td>0.150 (0.059 to 0.241)</td>" in page


def test_the_cheapest_setting_loses_little_on_texts() -> None:
    rows = summarize(predictions())
    assert cheapest(rows, 0.01, max_nats=0.2) == "two@0.25"
    assert cheapest(rows, 0.01, max_nats=0.02) == "one@0.5"
    assert cheapest(rows, 0.01, max_nats=0.001) is None
