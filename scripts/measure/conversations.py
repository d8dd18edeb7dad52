"""Conversations whose later turns ask for what the first one said. No torch."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "release"))

from training import tasks
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import ruler

LATE = (2, 4, 8)  # turns that may ask for what the first one said
PER_TURN = 2  # such questions, the same in every one


@dataclass(frozen=True)
class Fact:
    """Something that was said, and how one asks for it.

    Attributes:
        question: for it.
        answer_prefix: how the reply begins; the model goes on from there.
        answer: the rest of the reply.
        wanted: what it has to contain.
        sentence: that says it.
    """

    question: str
    answer_prefix: str
    answer: str
    wanted: tuple[str, ...]
    sentence: str = ""


@dataclass(frozen=True)
class Turn:
    """What a user says, and is answered.

    Attributes:
        text: what comes before the question.
        fact: that is asked for; the conversation goes on from there.
        late: of the first turn, each asked for instead, in a branch that nobody goes on with.
    """

    text: str
    fact: Fact
    late: tuple[Fact, ...] = ()


_TOKENS_PER_SENTENCE = 16
_DEMAND = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n"
)
_SMALL_TALK = Fact("Did you read this?", "Yes, I have read it", ". What comes next?", ())


@dataclass(frozen=True)
class Asked:
    """A request of a conversation.

    Attributes:
        turn: from 1 on.
        fact: that is asked for.
        is_late: of the first turn, in a branch.
        tokens: the prompt's ids, with all that was said before.
    """

    turn: int
    fact: Fact
    is_late: bool
    tokens: list[int]


def needles(num_turns: int, num_tokens: int, seed: int) -> list[Turn]:
    """Turns of RULER's haystack, the first one with two of its needles, and small talk about it.

    Args:
        num_turns: of the conversation.
        num_tokens: that each turn adds, about.
        seed: of everything random.
    """
    rng = random.Random(f"turns/{seed}")
    late = [_needle(key, rng) for key in ruler.distinct_keys(PER_TURN, rng)]
    size = max(1, num_tokens // _TOKENS_PER_SENTENCE)
    sentences = itertools.cycle(ruler.haystack())
    parts = []
    for number in range(1, num_turns + 1):
        filling = list(itertools.islice(sentences, size))
        if number == 1:
            for fact in late:
                filling.insert(rng.randrange(len(filling)), fact.sentence)  # never the last one
            filling.insert(0, _DEMAND)
        parts.append(_turn(number, " ".join(filling), _SMALL_TALK, late))
    return parts


def words(num_turns: int, num_tokens: int, seed: int) -> list[Turn]:
    """The same in the reference model's words: many facts in the first turn, then noise.

    Raises:
        ConfigError: turns that are too short for so many facts.
    """
    num_facts, rng = num_turns + PER_TURN, random.Random(f"turns/{seed}")
    scenes = (tasks.generate_scene("multikey", num_tokens, rng) for _ in range(1000))
    scene = next((scene for scene in scenes if len(scene.questions) >= num_facts), None)
    if scene is None:
        raise ConfigError(f"turns of {num_tokens} words: too short for {num_facts} facts.")
    facts = [
        Fact(" ".join(question), "", " ".join(answer), tuple(answer[1:]))
        for question, answer in rng.sample(scene.questions, num_facts)
    ]
    parts = []
    for turn in range(num_turns):
        said = rng.choices(tasks.NOISE, k=num_tokens) if turn else scene.words
        parts.append(_turn(turn + 1, " ".join(said), facts[turn], facts[num_turns:]))
    return parts


def requests(tokenizer: Any, turns: Sequence[Turn]) -> Iterator[Asked]:
    """A conversation's requests, in the order in which they may be asked.

    Replies are the right ones, whatever the model says, so that every setting reads the same.

    Args:
        tokenizer: with a chat template under which a longer conversation begins as a shorter one.
        turns: of the conversation.
    """
    messages: list[dict[str, str]] = []
    before, tokens = "", list[int]()
    for number, turn in enumerate(turns, start=1):
        for fact in (*turn.late, turn.fact):
            asked = [*messages, {"role": "user", "content": f"{turn.text}\n{fact.question}"}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            if not text.startswith(before):
                raise ConfigError("the chat template changes former turns: nothing goes on here.")
            text += fact.answer_prefix
            new = tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]
            yield Asked(number, fact, fact is not turn.fact, tokens + new)
        before, tokens = text, tokens + new
        reply = f"{turn.fact.answer_prefix}{turn.fact.answer}"
        messages = [*asked, {"role": "assistant", "content": reply}]


def _turn(number: int, text: str, fact: Fact, late: Sequence[Fact]) -> Turn:
    return Turn(text, fact, tuple(late) if number in LATE else ())


def _needle(key: str, rng: random.Random) -> Fact:
    value = str(rng.randint(10**6, 10**7 - 1))
    return Fact(
        question=f"What is the special magic number for {key} mentioned in the text?",
        answer_prefix=f"The special magic number for {key} mentioned in the text is:",
        answer=f" {value}.",
        wanted=(value,),
        sentence=ruler.NEEDLE.format(kind="numbers", key=key, value=value),
    )
