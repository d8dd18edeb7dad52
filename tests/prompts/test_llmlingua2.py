"""Kept words, against the authors' package and against plain loops."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, BertConfig

from llmlingua_golden import CASES, KINDS, TEXTS, build_classifier
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.llmlingua2 import TokenClassifier
from vllm_kvcompress.prompts.words import ScoredText, ScoredWords, chunk_bounds, joined

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "llmlingua2.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    return {kind: build_classifier(kind, folder) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kept_pieces(scored: ScoredText, text: str, rate: float) -> list[tuple[str, bool]]:
    return [
        (text[start:end], bool(kept))
        for words in scored.chunks
        for start, end, kept in zip(words.starts, words.ends, words.kept(rate), strict=True)
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_the_same_words_stay_as_in_the_authors_package(
    name: str, kind: str, folders: dict[str, Path]
) -> None:
    text, actual = TEXTS[name], GOLDEN[kind][name]
    assert [each["case"] for each in actual] == [
        case for case in CASES if case in found_cases(name)
    ]
    for each in actual:
        case = each["case"]
        classifier = TokenClassifier(str(folders[kind]), force_tokens=case.get("force_tokens", ()))
        scored = classifier.score(text)
        rate = case.get("rate") or min(1.0, case["target_token"] / scored.num_tokens)
        pieces = kept_pieces(scored, text, rate)
        assert [piece for piece, _ in pieces] == each["words"].replace("##", "").split(" ")
        assert "".join(str(int(kept)) for _, kept in pieces) == each["kept"]
        assert 0 < each["kept"].count("1") < len(pieces)


def found_cases(name: str) -> tuple[dict[str, Any], ...]:
    return CASES[:: len(TEXTS[name]) // 1500 + 1]


def test_golden_texts_are_cut_into_chunks(kind: str, folders: dict[str, Path]) -> None:
    classifier = TokenClassifier(str(folders[kind]))
    assert len(classifier.score(TEXTS["long"]).chunks) > 2
    assert len(classifier.score(TEXTS["unbroken"]).chunks) > 2


def test_chunks_have_the_same_probabilities_in_a_batch_as_alone(
    kind: str, folders: dict[str, Path]
) -> None:
    """Chunks of a batch, which are padded, have the probabilities that they have alone."""
    classifier = TokenClassifier(str(folders[kind]))
    chunks = [np.array([5, 9, 30, 31, 12] * n) for n in (3, 40, 1, 7)]
    together = classifier._probabilities(chunks)
    for chunk, probabilities in zip(chunks, together, strict=True):
        np.testing.assert_allclose(probabilities, classifier._probabilities([chunk])[0], atol=1e-5)


def loops(probabilities: list[float], counts: list[int], rate: float) -> list[bool]:
    """Kept words by plain loops: the threshold is interpolated between two tokens."""
    of_tokens = sorted(p for p, n in zip(probabilities, counts, strict=True) for _ in range(n))
    place = min(100, int(100 * (1 - rate) + 1)) / 100 * (len(of_tokens) - 1)
    below = int(place)
    above = min(below + 1, len(of_tokens) - 1)
    threshold = of_tokens[below] + (of_tokens[above] - of_tokens[below]) * (place - below)
    return [p > threshold or (threshold == 1.0 and p == 1.0) for p in probabilities]


@pytest.mark.parametrize("seed", range(6))
def test_kept_words_are_those_of_the_loop(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.choice([draw.random(), 1.0]) for _ in range(211)]
    begins = [True, *(draw.random() < 0.6 for _ in tokens[1:])]
    forced = [draw.random() < 0.05 for _ in tokens]
    spans = np.array([[3 * i, 3 * i + 2] for i in range(len(tokens))], dtype=np.int32)
    words: list[list[int]] = []
    for index, starts in enumerate(begins):
        if starts:
            words.append([])
        words[-1].append(index)
    scored = ScoredWords.from_tokens(spans, np.array(tokens), np.array(begins), np.array(forced))
    means = [sum(1.0 if forced[i] else tokens[i] for i in word) / len(word) for word in words]
    assert scored.probabilities.tolist() == pytest.approx(means)
    assert scored.num_tokens.tolist() == [len(word) for word in words]
    assert scored.starts.tolist() == [3 * word[0] for word in words]
    assert scored.ends.tolist() == [3 * word[-1] + 2 for word in words]
    for rate in (0.01, 0.1, 0.5, 0.77, 0.99):
        exact = scored.probabilities.tolist()
        assert scored.kept(rate).tolist() == loops(exact, scored.num_tokens.tolist(), rate)


def test_chunks_end_where_a_sentence_does() -> None:
    text = "aaaa.bb.cccccccccccc"
    bounds = chunk_bounds([letter == "." for letter in text], 6)
    assert [text[start:end] for start, end in bounds] == ["aaaa.", "bb.", "ccccccc", "ccccc"]
    assert chunk_bounds([], 6) == []
    assert chunk_bounds([False] * 6, 6) == [(0, 6)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 3), (5, 8)], "Pay  $12"),  # as it stood
        ([(0, 3), (12, 16)], "Pay now!"),  # something between is left out
        ([(5, 8), (9, 11)], "$12 50"),  # two numbers do not become one
        ([(5, 9), (8, 11)], "$12.50"),  # parts may overlap
        ([(0, 3), (11, 12), (12, 15)], "Pay\nnow"),  # a line break that was asked for
        ([(3, 3)], ""),
        ([], ""),
    ],
)
def test_kept_parts_are_cut_from_the_text(spans: list[tuple[int, int]], expected: str) -> None:
    assert joined("Pay  $12.50\nnow!", spans) == expected


def test_a_rate_of_one_and_short_texts_change_nothing(folders: dict[str, Path]) -> None:
    classifier = TokenClassifier(str(folders[KINDS[0]]), min_tokens=40)
    for text in ("", "kalo", TEXTS["short"]):
        scored = classifier.score(text)
        for rate in (1.0, *([0.5] if scored.num_tokens < 40 else [])):
            assert scored.shortened(text, rate) == (text, scored.num_tokens)
    alone = TokenClassifier(str(folders[KINDS[0]])).score("kalo")
    assert alone.chunks
    assert alone.shortened("kalo", 0.5)[0] == "kalo"


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_a_rate_is_one_of_tokens_and_keeps_order(
    rate: float, kind: str, folders: dict[str, Path]
) -> None:
    text = TEXTS["long"]
    scored = TokenClassifier(str(folders[kind])).score(text)
    short, num_kept = scored.shortened(text, rate)
    assert rate - 0.03 < num_kept / scored.num_tokens <= rate
    rest = iter(text)
    assert all(letter in rest for letter in short if not letter.isspace())


def test_forced_texts_stay_where_they_stood(folders: dict[str, Path]) -> None:
    """A line break is no token, "12.5" several."""
    classifier = TokenClassifier(str(folders[KINDS[0]]), force_tokens=["\n", "12.5"])
    text = TEXTS["short"]
    short, _ = classifier.score(text).shortened(text, 0.1)
    assert short.index("12.5") < short.index("\n")
    assert len(short) < len(text) / 2


def save(folder: Path, config: Any, architecture: str) -> str:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)


def test_models_that_are_no_classifier_are_refused(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    cases = {
        str(tmp_path / "nothing"): "no model there that can be read",
        save(tmp_path / "masked", BertConfig(**shape), "BertForMaskedLM"): "found BertForMaskedLM",
        save(
            tmp_path / "names", BertConfig(**shape, num_labels=9), "BertForTokenClassification"
        ): "expected two labels",
        save(
            tmp_path / "empty", BertConfig(**shape), "BertForTokenClassification"
        ): "cannot be loaded",
    }
    for name, reason in cases.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            TokenClassifier(name)
        assert "choose a LLMLingua-2 classifier" in str(caught.value)
    short = AutoConfig.from_pretrained(folders[KINDS[0]])
    assert short.max_position_embeddings == 512
    with pytest.raises(ConfigError, match="cannot be loaded on cuda:9"):
        TokenClassifier(str(folders[KINDS[0]]), device="cuda:9")
