"""Conversations whose later turns ask for what the first one said. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import ruler, texts
from vllm_kvcompress.tools.reference import tasks

LATE = (2, 4, 8)  # turns that may ask for what the first one said
PER_TURN = 2  # such questions


@dataclass(frozen=True)
class Fact:
    """Something that was said, and how one asks for it.

    Attributes:
        question: for it.
        answer_prefix: how the reply begins; the model goes on from there.
        answer: the rest of the reply.
        wanted: what it has to contain.
    """

    question: str
    answer_prefix: str
    answer: str
    wanted: tuple[str, ...]


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
    """Turns of prose with RULER's needles between its lines, several of them in the first turn.

    Later turns bring one of their own, which is what they ask for when the conversation goes on.

    Args:
        num_turns: of the conversation.
        num_tokens: that each turn adds, by a generous estimate.
        seed: of everything random, and number of the piece of prose.
    """
    rng = random.Random(f"turns/{seed}")
    late = [turn for turn in LATE if turn <= num_turns]
    keys = ruler.distinct_keys(num_turns + PER_TURN * len(late), rng)
    values = [str(rng.randint(10**6, 10**7 - 1)) for _ in keys]
    facts = [_needle(key, value) for key, value in zip(keys, values, strict=True)]
    sentences = [
        ruler.NEEDLE.format(kind="numbers", key=key, value=value)
        for key, value in zip(keys, values, strict=True)
    ]
    (piece,) = texts.pieces("prose", num_turns * num_tokens, seed, 1)
    lines = piece.splitlines()
    found = []
    for turn in range(num_turns):
        mine = lines[turn * len(lines) // num_turns : (turn + 1) * len(lines) // num_turns]
        said = [sentences[turn], *(sentences[num_turns:] if turn == 0 else ())]
        for sentence in said:
            mine.insert(rng.randrange(len(mine)), sentence)  # not behind the last line
        begin = num_turns + PER_TURN * late.index(turn + 1) if turn + 1 in late else len(facts)
        found.append(Turn("\n".join(mine), facts[turn], tuple(facts[begin : begin + PER_TURN])))
    return found


def words(num_turns: int, num_tokens: int, seed: int) -> list[Turn]:
    """The same in the reference model's words: facts in the first turn only, then noise."""
    late = [turn for turn in LATE if turn <= num_turns]
    num_facts = num_turns + PER_TURN * len(late)
    rng = random.Random(f"turns/{seed}")
    scenes = (tasks.generate_scene("multikey", num_tokens, rng) for _ in range(1000))
    scene = next((scene for scene in scenes if len(scene.questions) >= num_facts), None)
    if scene is None:
        raise ConfigError(f"turns of {num_tokens} words: too short for {num_facts} facts.")
    facts = [
        Fact(" ".join(question), "", " ".join(answer), tuple(answer[1:]))
        for question, answer in rng.sample(scene.questions, num_facts)
    ]
    found = [Turn(" ".join(scene.words), facts[0])]
    for turn in range(2, num_turns + 1):
        noise = " ".join(rng.choices(tasks.NOISE, k=num_tokens))
        begin = num_turns + PER_TURN * late.index(turn) if turn in late else num_facts
        found.append(Turn(noise, facts[turn - 1], tuple(facts[begin : begin + PER_TURN])))
    return found


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


def _needle(key: str, value: str) -> Fact:
    return Fact(
        question=f"What is the special magic number for {key} mentioned in the text?",
        answer_prefix=f"The special magic number for {key} mentioned in the text is:",
        answer=f" {value}.",
        wanted=(value,),
    )
