"""`vllm-kvcompress explain-request` on the reference model, through real engines."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests import tiny_models
from tests.cli.server_process import ROOT
from training.tasks import generate_sample
from vllm_kvcompress.cli.explain_request import read_body
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.engine_process import EngineProcess
from vllm_kvcompress.vllm_plugin.compat.engine import greedy

MODEL = str(ROOT / "models" / "reference")
OPTIONS = {"enforce_eager": True, "max_model_len": 2048, "dtype": "float32"}
ENGINE = [f"--engine={key}={json.dumps(value)}" for key, value in OPTIONS.items()]
LAYERS, HEADS, BLOCK = 4, 4, 32
SAMPLE = generate_sample("multikey", num_tokens=600, seed=7)
PROMPT = f"<bos> {SAMPLE.context} {SAMPLE.question} <answer>"
Held = list[list[torch.Tensor]]  # by layer and head, keys


def remember_pages(worker: Any) -> None:
    """Copies the keys in the pages of every head after each event; nothing else is changed."""
    (group,) = worker.compression.groups.values()
    runner, tables = group.runner, group.tables
    finish = runner.finish
    worker.pages_of_heads = []

    def finishing(event: Any) -> None:
        finish(event)
        counts = tables.counts[:, event.slot]
        rows = tables.rows.read(torch.tensor([event.slot]), int(counts.max()))[:, 0]
        worker.pages_of_heads = [
            [
                tables.pool.keys(rows[layer, head, : int(counts[layer, head])].long(), layer)
                .flatten(0, 1)
                .clone()
                for head in range(HEADS)
            ]
            for layer in range(LAYERS)
        ]

    runner.finish = finishing


def pages_of(worker: Any) -> Held:
    held: Held = worker.pages_of_heads
    return held


def serve_plainly(llm: Any, tokens: list[int]) -> tuple[list[int], Held]:
    """The answer to a prompt, and the keys that lie in the pages of every head at the end."""
    llm.collective_rpc(remember_pages)
    prompt = {"prompt_token_ids": tokens}
    params = greedy(max_tokens=70, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), llm.collective_rpc(pages_of)[0]


def positions_of(keys: torch.Tensor, dense: torch.Tensor) -> list[int | None]:
    """Which token of an uncompressed run each key is; None: it is none of them."""
    positions: list[int | None] = []
    for key in keys:
        distances = (dense - key).abs().amax(dim=1)
        nearest = int(distances.argmin())
        positions.append(nearest if distances[nearest] < 1e-3 else None)
    return positions


SERVERS = {
    "prompt": {"policy": "adakv+criticalkv", "budget": 0.25},
    "in place": {"policy": "keydiff", "budget": 0.5, "trigger": "prompt,decode:32"},
    "chunks": {"policy": "snapkv", "budget": 0.25, "trigger": "chunk:128"},
}


@pytest.mark.parametrize("name", SERVERS)
def test_it_says_what_lies_in_the_pages(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys in the pages of an engine that nobody watches are those of the said positions."""
    settings = SERVERS[name]
    file, page, document = tmp_path / "p.json", tmp_path / "out" / "p.html", tmp_path / "d.json"
    file.write_text(json.dumps({"prompt": PROMPT, "ignore_eos": True}))
    flags = [f"--kv-{key}={value}" for key, value in settings.items()]
    arguments = ["explain-request", str(file), MODEL, *flags, *ENGINE, "--max-tokens", "70"]
    assert main([*arguments, "--out", str(page), "--json", str(document)]) == 0
    assert capsys.readouterr().out == f"{page}: compressed\n"
    said = json.loads(document.read_text())
    tokens = said["prompt_tokens"]
    with EngineProcess(MODEL, settings, OPTIONS, tmp_path / "log", serve_plainly) as engine:
        answer, held = engine.call(tokens)
    assert said["answer_tokens"] == answer
    assert [event["trigger"] for event in said["events"]].count("prompt") == (name != "chunks")
    assert (len(said["events"]) > 1) == (name != "prompt")

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor([tokens])).past_key_values
    assert [each["layer"] for each in said["held"]] == list(range(LAYERS))
    for layer in range(LAYERS):
        if name == "chunks" and layer > 0:  # later chunks have read a compressed cache
            break
        for head in range(HEADS):
            dense = cache.layers[layer].keys[0, head]
            stored = positions_of(held[layer][head], dense)
            ours = said["held"][layer]["heads"][head]
            assert len(stored) == len(ours)
            assert [p if p < len(tokens) else None for p in ours] == stored
            assert len(set(ours)) == len(ours)

    assert "".join(text for _, text in said["pieces"]["prompt"]) == PROMPT
    assert sum(number for number, _ in said["pieces"]["prompt"]) == len(tokens)
    titles = re.findall(r'title="token (\d+): (\d+) of (\d+)"', page.read_text())
    counts = Counter(p for layer in said["held"] for head in layer["heads"] for p in head)
    end = said["compressed_tokens"]
    for place, number, most in titles:
        expected = counts[int(place)] if int(place) < end else LAYERS * HEADS
        assert (int(number), int(most)) == (expected, LAYERS * HEADS)
    assert len(titles) == len(tokens) + len(answer)


def test_any_text_is_shown_exactly(tmp_path: Path) -> None:
    """In a model whose tokens are bytes, and in which every other layer is compressed."""
    text = "<p>é€ , n't . 😀\r\n" * 20 + "&amp;"
    model = tiny_models.build("gemma3", tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    file, page, document = tmp_path / "p.txt", tmp_path / "p.html", tmp_path / "p.out.json"
    file.write_bytes(text.encode())
    arguments = ["explain-request", str(file), str(model), "--kv-policy", "snapkv", *ENGINE]
    assert main([*arguments, "--out", str(page), "--json", str(document)]) == 0
    said = json.loads(document.read_text())
    assert len(said["prompt_tokens"]) == len(text.encode())
    assert "".join(piece for _, piece in said["pieces"]["prompt"]) == text
    assert [each["layer"] for each in said["held"]] == [1, 3]
    assert text in Text(page.read_text()).text


class Text(HTMLParser):
    """The visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_chat_that_stays_whole_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompt is rendered as the server renders it, and its own limit of tokens counts."""
    body = {
        "model": "ignored",
        "messages": [{"role": "user", "content": "n1 n2 k3 find k3"}],
        "max_completion_tokens": 5,
        "temperature": 0.7,
    }
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(body))
    page = tmp_path / "chat.html"
    arguments = ["explain-request", str(file), MODEL, "--kv-policy", "snapkv", *ENGINE]
    assert main([*arguments, "--out", str(page), "--json", str(tmp_path / "out.json")]) == 0
    assert "not compressed: fewer logical tokens" in capsys.readouterr().out
    said = json.loads((tmp_path / "out.json").read_text())
    assert (
        "".join(text for _, text in said["pieces"]["prompt"]) == "<bos> n1 n2 k3 find k3 <answer>"
    )
    assert len(said["answer_tokens"]) <= 5
    assert said["skipped"] == {"shorter_than_min_tokens": 1}
    text = Text(page.read_text()).text
    assert "(shorter_than_min_tokens). Every head holds all 7 tokens of the prompt." in text
    assert "max_tokens5" in text


def test_protected_roles_are_those_of_the_server(tmp_path: Path) -> None:
    """A chat's system message, and the tokens that the request names itself, are with all heads."""
    words = [f"n{number % 16}" for number in range(3, 43)]
    body = {
        "messages": [
            {"role": "system", "content": " ".join(words)},
            {"role": "user", "content": f"{SAMPLE.context} {SAMPLE.question}"},
        ],
        "vllm_xargs": {"kv_protect": [100, 110]},
    }
    file, document = tmp_path / "chat.json", tmp_path / "out.json"
    file.write_text(json.dumps(body))
    arguments = ["explain-request", str(file), MODEL, "--kv-policy", "snapkv", *ENGINE]
    arguments += ["--kv-budget", "0.25", "--kv-protect", "system", "--json", str(document)]
    assert main([*arguments, "--out", str(tmp_path / "chat.html")]) == 0
    said = json.loads(document.read_text())
    # The template puts <bos> before the first message.
    assert "".join(text for _, text in said["pieces"]["prompt"][1:41]).split() == words
    (event,) = said["events"]
    assert event["protected"] == [[1, 41], [100, 110]]
    heads = [head for layer in said["held"] for head in layer["heads"]]
    assert len(heads) == LAYERS * HEADS
    for head in heads:
        assert {*range(1, 41), *range(100, 110)} <= set(head)
        assert len(set(head)) == len(head) < event["source_tokens"]
    classes = re.findall(r'<span class="([^"]*)" title', (tmp_path / "chat.html").read_text())
    marked = [place for place, names in enumerate(classes) if "protected" in names]
    assert marked == [*range(1, 41), *range(100, 110)]


BODIES: dict[str, tuple[str, str]] = {
    "cut off": ('{"prompt": ', "found no JSON"),
    "list": ('["a"]', "found list"),
    "neither": ('{"model": "m", "input": "a"}', "found keys model, input"),
    "both": ('{"prompt": "a", "messages": []}', "found keys prompt, messages"),
    "no prompt": ('{"prompt": ""}', 'not empty, found ""'),
    "several": ('{"prompt": ["a", "b"]}', "give one prompt"),
    "numbers": ('{"prompt": [1, true]}', "token ids"),
    "no messages": ('{"messages": []}', "messages: expected"),
    "words": ('{"messages": "hello"}', 'found "hello"'),
    "documents": ('{"prompt": "a", "documents": [1]}', "documents is not supported here"),
    "options": ('{"prompt": "a", "vllm_xargs": 3}', "vllm_xargs: expected an object"),
    "limit": ('{"prompt": "a", "max_tokens": "many"}', "max_tokens: expected a number"),
    "no text": ("", "found no JSON"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request_are_refused(name: str, tmp_path: Path) -> None:
    content, reason = BODIES[name]
    file = tmp_path / "body.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(reason)) as refusal:
        read_body(file)
    assert str(refusal.value).startswith(str(file))


@pytest.mark.parametrize(
    ("body", "prompt"),
    [('{"prompt": ["a"]}', "a"), ('{"prompt": [[4, 5]]}', [4, 5]), ('{"prompt": [4]}', [4])],
)
def test_prompts_may_be_lists(body: str, prompt: str | list[int], tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text(body)
    assert read_body(file)["prompt"] == prompt


REFUSED: dict[str, tuple[str, str | bytes, list[str], str]] = {
    "nothing": ("p.txt", "", [], "found an empty file"),
    "bytes": ("p.txt", b"\xff\xfe", [], "expected text in UTF-8"),
    "merges": ("p.txt", "a", ["--kv-policy", "kvmerger"], "kvmerger merges evicted tokens"),
    "policy": ("p.txt", "a", ["--kv-policy", "nothing"], "nothing"),
    "option": (
        "p.json",
        '{"prompt": "a", "vllm_xargs": {"kv_none": 1}}',
        [],
        "kv_none is not known",
    ),
    "budget": (
        "p.json",
        '{"prompt": "a", "vllm_xargs": {"kv_budget": 0.1}}',
        [],
        "lets no request",
    ),
    "limit": ("p.txt", "a", ["--max-tokens", "0"], "--max-tokens 0: expected at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_explained_is_refused_before_an_engine_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, options, reason = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = tmp_path / "page.html"
    assert main(["explain-request", str(path), MODEL, *options, "--out", str(out)]) == 2
    assert reason in capsys.readouterr().err
    assert not out.exists()


def test_a_prompt_that_is_too_long_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "p.txt", tmp_path / "page.html"
    file.write_text("n1 " * 2100)
    arguments = ["explain-request", str(file), MODEL, "--kv-policy", "snapkv", *ENGINE]
    assert main([*arguments, "--out", str(page)]) == 1
    error = capsys.readouterr().err
    assert "2048" in error
    assert "Traceback" not in error
    assert "the engine ended" not in error
    assert not page.exists()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-request", str(tmp_path / "none.txt"), MODEL]) == 1
    assert "none.txt: No such file or directory" in capsys.readouterr().err
