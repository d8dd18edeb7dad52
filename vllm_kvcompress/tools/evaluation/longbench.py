"""LongBench's 16 English tasks (arXiv 2308.14508), from local files in the published format.

Prompts, reply lengths, the choice of metrics and the rules below are those of THUDM/LongBench
(MIT). Its data are not ours to ship: the published archive holds one `TASK.jsonl` per task.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.files import read_within

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_BRIEFLY = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
    "explanation.\n\n"
)
_STORY = (
    "as concisely as you can, using a single phrase if possible. Do not provide any explanation."
    "\n\n"
)


@dataclass(frozen=True)
class Task:
    """How one data set is asked and scored.

    Attributes:
        prompt: with `{context}` and, but for summaries, `{input}` behind it.
        max_tokens: of the reply.
        metric: a name in METRICS.
        chat: whether a chat model's template goes around the prompt.
    """

    prompt: str
    max_tokens: int
    metric: str
    chat: bool = True


TASKS = {
    "narrativeqa": Task(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {_STORY}Story: {{context}}\n\n"
        f"Now, answer the question based on the story {_STORY}Question: {{input}}\n\nAnswer:",
        128,
        "f1",
    ),
    "qasper": Task(
        f"You are given a scientific article and a question. Answer the question {_BRIEFLY}"
        f"Article: {{context}}\n\n Answer the question based on the above article {_BRIEFLY}"
        "Question: {input}\n\nAnswer:",
        128,
        "f1",
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        "f1",
    ),
    "hotpotqa": Task(_PASSAGES, 32, "f1"),
    "2wikimqa": Task(_PASSAGES, 32, "f1"),
    "musique": Task(_PASSAGES, 32, "f1"),
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n{input}",
        64,
        "first_line_classification",
        chat=False,
    ),
    "triviaqa": Task(
        "Answer the question based on the given passage. Only give me the answer and do not "
        "output any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        "first_line_f1",
        chat=False,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples."
        "\n\n{context}\n\n{input}",
        128,
        "first_line_rouge_l",
        chat=False,
    ),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there "
        "are after removing duplicates. In other words, how many non-repeating paragraphs are "
        "there in total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, "
        "and so on.\n\nThe final answer is: ",
        32,
        "number",
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer "
        'format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "number",
    ),
    "lcc": Task(
        "Please complete the code given below. \n{context}Next line of code:\n",
        64,
        "code_similarity",
        chat=False,
    ),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_similarity",
        chat=False,
    ),
}


@dataclass(frozen=True)
class Prompt:
    """One line of a task's file.

    Attributes:
        context: the prompt up to the end of its context.
        question: the rest of the prompt.
        answers: references; for a classification the right class, then all classes.
        length: words, as the file says.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    length: int


def load(task: str, folder: Path, num_samples: int) -> list[Prompt]:
    """The first lines of a task's file.

    Args:
        task: a name in TASKS.
        folder: holds `TASK.jsonl`.
        num_samples: how many lines, at most.

    Raises:
        ConfigError: no such file, or not in LongBench's format.
    """
    path = folder / f"{task}.jsonl"
    try:
        lines = read_within(path).splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); --longbench-data is the folder with "
            "LongBench's published files, one TASK.jsonl per task."
        ) from None
    rows = [line for line in lines if line.strip()][:num_samples]
    if not rows:
        raise ConfigError(f"{path}: no questions in it.")
    return [_prompt(task, f"{path}, line {number}", row) for number, row in enumerate(rows, 1)]


def _prompt(task: str, place: str, line: str) -> Prompt:
    try:
        row: dict[str, Any] = json.loads(line)
        context, question, answers = row["context"], row["input"], row["answers"]
        classes = row.get("all_classes") or []
        length = int(row.get("length", 0))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'{place}: expected LongBench\'s "input", "context" and "answers", got {error!r}.'
        ) from None
    before, _, after = TASKS[task].prompt.partition("{context}")
    return Prompt(
        context=before + context,
        question=after.replace("{input}", question),
        answers=(*answers[:1], *classes) if classes else tuple(answers),
        length=length,
    )
