"""Scores of replies against reference answers, in [0, 1]."""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from vllm_kvcompress.errors import ConfigError

Metric = Callable[[str, Sequence[str]], float]


def normalize(text: str) -> list[str]:
    """Words in lower case, without punctuation and English articles (SQuAD's normalisation)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def exact_match(reply: str, answers: Sequence[str]) -> float:
    """1 if the reply is one of the answers, up to normalisation."""
    said = normalize(reply)
    return float(any(said == normalize(answer) for answer in answers))


def contains_all(reply: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the reply as whole words (RULER's string match, all)."""
    return sum(_occurs(answer, reply) for answer in answers) / len(answers)


def contains_any(reply: str, answers: Sequence[str]) -> float:
    """1 if any answer occurs in the reply as whole words (RULER's string match, part)."""
    return float(any(_occurs(answer, reply) for answer in answers))


def f1(reply: str, answers: Sequence[str]) -> float:
    """Best F1 of the reply's words against an answer's (SQuAD, arXiv 1606.05250)."""
    return max(_f1(normalize(reply), normalize(answer)) for answer in answers)


def rouge_l(reply: str, answers: Sequence[str]) -> float:
    """Best ROUGE-L F1 of the reply against an answer, summary level.

    Sentences end at full stops, as in the `rouge` package that LongBench published its scores
    with; single replies differ from those by up to 0.1, means by less than 0.01.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeLsum"])
    said = reply.replace(".", "\n")
    scores = [scorer.score(answer.replace(".", "\n"), said) for answer in answers]
    return float(max(score["rougeLsum"].fmeasure for score in scores))


def code_similarity(reply: str, answers: Sequence[str]) -> float:
    """Best edit similarity of the reply's first line of code (LongBench), to whole percents."""
    from rapidfuzz import fuzz

    lines = reply.lstrip("\n").split("\n")
    code = next((line for line in lines if not re.search(r"`|#|//", line)), "")
    return max(round(fuzz.ratio(code, answer)) / 100 for answer in answers)


def classification(reply: str, answers: Sequence[str]) -> float:
    """The right class's share of the classes that the reply names (LongBench).

    `answers` holds the right class, then all classes. A class whose name is part of the right one's
    name does not count as named.
    """
    right, *classes = answers
    named = [name for name in classes if name in reply and (name == right or name not in right)]
    return 1 / len(named) if right in named else 0.0


def number(reply: str, answers: Sequence[str]) -> float:
    """Share of the reply's numbers that are the first number of an answer (LongBench), at best."""
    said = re.findall(r"\d+", reply)
    wanted = [re.findall(r"\d+", answer)[0] for answer in answers]
    return max((said.count(right) / len(said) for right in wanted), default=0.0) if said else 0.0


def last_answer(reply: str, answers: Sequence[str]) -> float:
    """1 if one of the answers stands behind the reply's last "Answer:", alone in its line."""
    said = re.findall(r"answer:(.*)", reply, re.IGNORECASE)
    return float(bool(said) and said[-1].strip(" *$.`") in answers)


def first_line(metric: Metric) -> Metric:
    """Applies a metric to the reply's first line (LongBench: prompts show several examples)."""
    return lambda reply, answers: metric(reply.lstrip("\n").split("\n")[0], answers)


def _occurs(answer: str, reply: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", reply.lower()) is not None


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "contains_all": contains_all,
    "contains_any": contains_any,
    "f1": f1,
    "rouge_l": rouge_l,
    "code_similarity": code_similarity,
    "classification": classification,
    "number": number,
    "last_answer": last_answer,
    "first_line_f1": first_line(f1),
    "first_line_rouge_l": first_line(rouge_l),
    "first_line_classification": first_line(classification),
}

_LIBRARIES = {"rouge_l": "rouge_score", "code_similarity": "rapidfuzz"}


def check_metric(name: str, where: str) -> None:
    """Refuses metrics that are unknown, or whose library is not installed.

    `where` names the option or line that asked for it, for the message.

    Raises:
        ConfigError: names the known metrics, or what to install.
    """
    if name not in METRICS:
        raise ConfigError(f"{where} {name!r}: known are {', '.join(METRICS)}.")
    library = _LIBRARIES.get(name.removeprefix("first_line_"))
    if library and importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"{where} {name!r} needs the package {library}; "
            "pip install 'vllm-kvcompress[longbench]'."
        )
