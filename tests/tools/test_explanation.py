"""The page of a request's kept tokens: its text, its counts, and why a request stayed whole."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.cli.chromium import CHROMIUM, tab
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.ledger import SKIP_REASONS
from vllm_kvcompress.tools.explanation.kept import text_pieces
from vllm_kvcompress.tools.explanation.page import html_page, why_whole

# Characters of one to four bytes, markup, line breaks of both kinds, a broken character.
TEXT = "\n<b>&amp; \"quoted\" 'é' €\r\n\n \t😀👩‍🚀 \ufffd end </div><script>x</script> 語"


def byte_tokens(text: str) -> tuple[Tokenizer, list[int]]:
    """A tokenizer without merges, so that every byte is a token, and the tokens of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, tokenizer.encode(text).ids


@pytest.mark.parametrize("text", [TEXT, "plain", "😀", "é" * 5, "\ufffd", "a\ufffd\ufffd"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    tokenizer, tokens = byte_tokens(text)
    assert len(tokens) == len(text.encode())
    pieces = list(text_pieces(tokenizer.decode, tokens))
    assert "".join(piece for _, piece in pieces) == text
    assert sum(number for number, _ in pieces) == len(tokens)
    for number, piece in pieces:
        assert number == len(piece.encode())
        assert len(piece) == 1 or "\ufffd" in piece, "one character, unless it looks broken"


def test_pieces_of_a_character_that_was_cut_off() -> None:
    tokenizer, tokens = byte_tokens("ab😀")
    pieces = list(text_pieces(tokenizer.decode, tokens[:-1]))
    assert pieces[:2] == [(1, "a"), (1, "b")]
    assert "".join(piece for _, piece in pieces) == tokenizer.decode(tokens[:-1])


def explained(text: str, held: list[list[list[int]]], end: int, **event: Any) -> dict[str, Any]:
    """What `explain` returns for a text whose bytes are tokens; layers 1, 3 and so on."""
    tokenizer, tokens = byte_tokens(text)
    only = {
        "policy": "<policy>",
        "trigger": "prompt",
        "position": len(tokens),
        "compressed_tokens": end,
        "source_tokens": end,
        "kept_tokens": 2,
        "num_sinks": 0,
        "num_recent": 0,
        "protected": [],
        **event,
    }
    return {
        "model": "a <model>",
        "settings": {"policy": "<policy>", "budget": 0.5},
        "prompt_tokens": tokens,
        "answer_tokens": tokens[:2],
        "pieces": {
            "prompt": list(text_pieces(tokenizer.decode, tokens)),
            "answer": list(text_pieces(tokenizer.decode, tokens[:2])),
        },
        "compressed_tokens": end,
        "held": [{"layer": 2 * i + 1, "heads": heads} for i, heads in enumerate(held)],
        "events": [only] if end else [],
        "skipped": {},
    }


class Spans(HTMLParser):
    """Collects the spans of one text: class names, title and text."""

    def __init__(self, page: str, part: str) -> None:
        super().__init__()
        self.spans: list[tuple[list[str], str, str]] = []
        self._part, self._inside, self._now = part, False, None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "div":
            self._inside = given.get("id") == self._part
        elif tag == "span" and self._inside:
            self.spans.append((str(given["class"]).split(), str(given["title"]), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "div"

    def handle_data(self, data: str) -> None:
        if self._inside:
            names, title, text = self.spans[-1]
            self.spans[-1] = names, title, text + data

    @property
    def text(self) -> str:
        return "".join(text for _, _, text in self.spans)


def test_the_text_is_the_prompt_whatever_is_in_it() -> None:
    page = html_page(explained(TEXT, [[[0]]], 8))
    assert Spans(page, "prompt").text == TEXT
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_text_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(html_page(explained(TEXT, [[[0, 3]], [[1, 2]]], 8)).encode())
    with tab(tmp_path / "browser") as browser:
        browser.call("Page.enable")
        browser.call("Page.navigate", url=path.as_uri())
        browser.wait_for(
            "document.readyState === 'complete' && !!document.querySelector('#answer')"
        )
        assert browser.value("document.querySelector('#prompt').textContent") == TEXT
        shades = (
            "[...document.querySelectorAll('#prompt span')].slice(0, 5)"
            ".map(each => getComputedStyle(each).backgroundColor)"
        )
        shown = browser.value(shades)
        assert len(set(shown)) > 1, "kept and evicted tokens look alike"
        browser.resize(390, 800)
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.value(fits), "a phone scrolls sideways"
        assert browser.errors == []


HELD = [[[0, 1, 5], [0, 2, 5]], [[0, 5, 7], [0, 1, 6]]]


@pytest.mark.parametrize(("layer", "head"), [(None, None), (1, None), (None, 1), (3, 0)])
def test_every_token_says_how_many_heads_hold_it(layer: int | None, head: int | None) -> None:
    page = html_page(explained("abcdefgh12", HELD, 8), layer, head)
    lists = [
        positions
        for number, heads in zip((1, 3), HELD, strict=True)
        for index, positions in enumerate(heads)
        if layer in (None, number) and head in (None, index)
    ]
    spans = Spans(page, "prompt").spans
    for place, (names, title, _) in enumerate(spans):
        held = 0
        for positions in lists:
            held += place in positions or place >= 8
        assert title == f"token {place}: {held} of {len(lists)}"
        assert ("k0" in names) == (held == 0)
        assert ("k10" in names) == (held == len(lists))
    answer = Spans(page, "answer").spans
    assert [title for _, title, _ in answer] == [
        f"token {place}: {len(lists)} of {len(lists)}" for place in (10, 11)
    ]
    assert re.findall("<td class=.*?>([0-9]+)</td>", page) == ["3"] * 4
    assert f"of {len(lists)} KV heads hold a token" in page
    assert re.findall('<path d="(.*?)">', page) == [
        "M0 0h2M5 0h1",
        "M0 1h1M2 1h1M5 1h1",
        "M0 2h1M5 2h1M7 2h1",
        "M0 3h2M6 3h1",
    ]


@pytest.mark.parametrize(("layer", "head"), [(2, None), (None, 2), (1, -1)])
def test_heads_that_the_model_does_not_have_are_refused(layer: int | None, head: int) -> None:
    with pytest.raises(ConfigError, match="expected one of layers 1, 3 and a KV head up to 1"):
        html_page(explained("abcdefgh12", HELD, 8), layer, head)


def test_tokens_that_are_always_kept_look_so() -> None:
    event = {"num_sinks": 2, "num_recent": 4, "protected": [(1, 3)]}
    spans = Spans(html_page(explained("abcdefgh12", HELD, 8, **event)), "prompt").spans
    kinds = [set(names) & {"sink", "recent", "protected"} for names, _, _ in spans]
    assert kinds == [{"sink"}, *[{"protected"}] * 2, *[set()] * 3, *[{"recent"}] * 4]


@pytest.mark.parametrize("reason", SKIP_REASONS)
def test_a_request_that_stayed_whole_says_why(reason: str) -> None:
    explanation = explained("abcdefgh", [], 0) | {"skipped": {reason: 1}}
    assert reason in str(why_whole(explanation))
    page = html_page(explanation)
    assert f"({reason}). Every head holds all 8 tokens" in page
    assert {title for _, title, _ in Spans(page, "prompt").spans} == {
        f"token {place}: kept whole" for place in range(8)
    }
    assert {names[0] for names, _, _ in Spans(page, "prompt").spans} == {"k10"}


@pytest.mark.parametrize(("position", "is_whole"), [(10, True), (8, False), (12, False)])
def test_only_an_event_at_the_end_of_the_prompt_leaves_the_first_token_whole(
    position: int, is_whole: bool
) -> None:
    page = html_page(explained("abcdefgh12", HELD, 8, position=position))
    assert ("first token comes from the whole prompt" in page) == is_whole


def test_a_request_that_nobody_wanted_to_compress_says_so() -> None:
    explanation = explained("abcdefgh", [], 0)
    assert "no trigger asked for it" in str(why_whole(explanation))
    assert why_whole(explained("abcdefgh", HELD, 8)) is None
