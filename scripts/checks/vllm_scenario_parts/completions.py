"""Completions over HTTP."""

from __future__ import annotations

from typing import Any

from vllm_scenario_parts.scenario import LONG, SHORT, Registry, Server, like

SERVED: Registry = []
COMPLETION = "tests/entrypoints/openai/completion/test_completion.py"
VALIDATION = "tests/entrypoints/openai/completion/test_prompt_validation.py"
SAMPLING = "tests/v1/sample/test_sampling_params_e2e.py"


def _texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


def _streamed(chunks: Any, n: int = 1) -> tuple[list[str], list[str]]:
    """Texts and finish reasons of a stream, by choice; each has one reason, in its last part."""
    texts, reasons = [""] * n, [""] * n
    for chunk in chunks:
        for choice in chunk.choices:
            assert not reasons[choice.index], "a part after the last one"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or ""
    assert all(reasons)
    return texts, reasons


@like(SERVED, COMPLETION, "test_single_completion")
def one_completion(server: Server) -> Any:
    """Of a text, and of tokens."""
    answer = server.complete(LONG, max_tokens=5, ignore_eos=True)
    (choice,) = answer.choices
    usage = answer.usage
    assert answer.id
    assert choice.finish_reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (200, 5, 205)
    of_tokens = server.complete([10] * 70, max_tokens=5, return_token_ids=True, ignore_eos=True)
    assert of_tokens.choices[0].prompt_logprobs is None
    assert of_tokens.choices[0].prompt_token_ids == [10] * 70
    return [choice.text, of_tokens.choices[0].token_ids]


@like(SERVED, COMPLETION, "test_completion_truncation_side_controls_prompt_truncation")
def truncated_prompts(server: Server) -> Any:
    """From the left, as is the default, and all of it where there is room."""
    found = []
    for most in (4, 60, 500):
        answer = server.complete(
            [*range(10, 110)], truncate_prompt_tokens=most, return_token_ids=True
        )
        kept = answer.choices[0].prompt_token_ids
        assert kept == [*range(10, 110)][-most:]
        found.append(answer.choices[0].token_ids)
    return found


@like(SERVED, COMPLETION, "test_no_logprobs", "test_zero_logprobs", "test_some_logprobs")
def logprobs(server: Server) -> Any:
    """None, of the token alone, of five more."""
    assert server.complete().choices[0].logprobs is None
    found = []
    for number in (0, 5):
        said = server.complete(logprobs=number).choices[0].logprobs
        assert all(1 <= len(top) <= number + 1 for top in said.top_logprobs)
        assert len(said.tokens) == len(said.token_logprobs) == len(said.text_offset)
        found.append([said.tokens, said.token_logprobs])
    assert found[0][0] == found[1][0]
    return found


@like(SERVED, COMPLETION, "test_too_many_completion_logprobs")
def too_many_logprobs(server: Server) -> Any:
    """Also of a stream; the server works afterwards."""
    kinds = [
        server.refuses(server.complete, logprobs=21),
        server.refuses(server.complete, logprobs=30, stream=True),
    ]
    return [*kinds, _texts(server.complete())]


@like(SERVED, COMPLETION, "test_prompt_logprobs_completion")
def prompt_logprobs(server: Server) -> Any:
    """Of two prompts; a negative number is refused."""
    found = []
    for number in (0, 1):
        for choice in server.complete([LONG, SHORT], prompt_logprobs=number).choices:
            assert choice.prompt_logprobs[0] is None
            of_tokens = choice.prompt_logprobs[1:]
            assert len(of_tokens) == (199, 14)[choice.index]
            found.append([[each["logprob"] for each in place.values()] for place in of_tokens])
    assert server.complete([LONG, SHORT]).choices[0].prompt_logprobs is None
    return [found, server.refuses(server.complete, prompt_logprobs=-5)]


@like(SERVED, COMPLETION, "test_completion_streaming")
def streamed(server: Server) -> Any:
    whole = server.complete().choices[0]
    (text,), (reason,) = _streamed(server.complete(stream=True))
    assert (text, reason) == (whole.text, whole.finish_reason)
    return text


@like(SERVED, COMPLETION, "test_parallel_no_streaming", "test_parallel_streaming")
@like(SERVED, SAMPLING, "test_n_gt_1", "test_seed")
def several_choices(server: Server) -> Any:
    """With a seed: other ones for every choice and seed, the same ones again."""
    settings = {"n": 3, "temperature": 1.0, "max_tokens": 30, "seed": 42}
    answer = server.complete(SHORT, **settings)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({*_texts(answer)}) == 3
    assert _streamed(server.complete(SHORT, **settings, stream=True), 3)[0] == _texts(answer)
    assert _texts(server.complete(SHORT, **{**settings, "seed": 43})) != _texts(answer)
    unseeded = server.complete(LONG, n=3, temperature=1.0)  # a seed: docs/limits.md, on CPUs
    assert len(unseeded.choices) == 3
    return _texts(answer)


@like(SERVED, COMPLETION, "test_completion_stream_options")
def usage_of_streams(server: Server) -> Any:
    """At the end, in every part, or not at all; not without a stream."""

    def usages(**options: bool) -> list[Any]:
        chunks = server.complete(stream=True, stream_options=options, ignore_eos=True)
        return [(bool(chunk.choices), chunk.usage) for chunk in chunks]

    assert all(usage is None for _, usage in usages())
    for continuous in (False, True):
        options = {"include_usage": False, "continuous_usage_stats": continuous}
        assert all(usage is None for _, usage in usages(**options))
    *parts, (has_choices, last) = usages(include_usage=True)
    assert all(usage is None for _, usage in parts)
    assert not has_choices
    assert (last.prompt_tokens, last.completion_tokens, last.total_tokens) == (200, 8, 208)
    counts = [u for _, u in usages(include_usage=True, continuous_usage_stats=True)]
    assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in counts)
    assert counts[-1].completion_tokens == 8
    return [
        server.refuses(server.complete, stream_options={name: value})
        for name in ("include_usage", "continuous_usage_stats")
        for value in (None, True)
    ]


@like(SERVED, COMPLETION, "test_batch_completions")
def many_prompts(server: Server) -> Any:
    """Of texts and of tokens, with several choices, streamed."""
    found = []
    for prompts in ([LONG] * 2, [[10] * 80] * 2):
        one, other = _texts(server.complete(prompts))
        assert one == other
        (streamed_one, streamed_other), _ = _streamed(server.complete(prompts, stream=True), 2)
        assert streamed_one == streamed_other == one
        assert len(server.complete(prompts, n=2, temperature=0.7).choices) == 4
        found.append(one)
    return found


@like(SERVED, COMPLETION, "test_batch_completions (use_beam_search)")
def beams(server: Server) -> Any:
    answer = server.complete([SHORT] * 2, n=2, max_tokens=5, use_beam_search=True)
    first, second, again, also = _texts(answer)
    assert first != second
    assert (first, second) == (again, also)
    return [first, second]


@like(SERVED, COMPLETION, "test_echo_logprob_completion")
@like(SERVED, "tests/entrypoints/openai/completion/test_completion_text_offset.py", "offsets")
def echoed(server: Server) -> Any:
    """The prompt first, with its logprobs."""
    found = []
    for number in (1, 0):
        choice = server.complete(LONG, echo=True, logprobs=number, ignore_eos=True).choices[0]
        said = choice.logprobs
        assert choice.text.startswith(LONG)
        assert len(said.tokens) == len(said.text_offset) == len(said.top_logprobs) == 208
        assert said.token_logprobs[0] is None
        assert said.top_logprobs[0] is None
        assert all(1 <= len(top) <= number + 1 for top in said.top_logprobs[1:])
        assert said.text_offset[:200] == [*range(200)]
        found.append([choice.text, said.token_logprobs])
    return found


@like(SERVED, VALIDATION, "test_empty_prompt", "test_out_of_vocab_token_ids")
@like(SERVED, "tests/entrypoints/openai/completion/test_empty_prompt_list.py", "an empty list")
def prompts_that_are_none(server: Server) -> Any:
    """Nothing, tokens that nobody has, more than the model takes."""
    prompts: tuple[Any, ...] = ([], [[]], None, [999999], [-1], [10] * 2000, ["a", [10]])
    return [server.refuses(server.complete, prompt=prompt) for prompt in prompts]


@like(SERVED, SAMPLING, "test_stop", "test_stop_token_ids")
def stops(server: Server) -> Any:
    """At a text, with it or without; at a token."""
    whole = server.complete(max_tokens=16, return_token_ids=True, ignore_eos=True).choices[0]
    word, token = whole.text[6:8], whole.token_ids[6]
    before = whole.text[: whole.text.index(word)]
    choice = server.complete(max_tokens=16, stop=[word], ignore_eos=True).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", word)
    with_it = server.complete(
        max_tokens=16, stop=[word], include_stop_str_in_output=True, ignore_eos=True
    )
    assert _texts(with_it) == [before + word]
    at_token = server.complete(
        max_tokens=16, stop_token_ids=[token], return_token_ids=True, ignore_eos=True
    ).choices[0]
    first = whole.token_ids.index(token)
    assert at_token.token_ids == whole.token_ids[: first + 1]
    assert (at_token.finish_reason, at_token.stop_reason) == ("stop", token)
    return [whole.text, before]


@like(SERVED, SAMPLING, "test_penalties", "test_bad_words", "test_allowed_token_ids")
def other_parameters(server: Server) -> Any:
    """Penalties, forbidden words, the only tokens that are allowed, and wrong ones."""
    penalties = {name: 1.2 for name in ("presence_penalty", "frequency_penalty")}
    penalties |= {"repetition_penalty": 1.2, "min_p": 0.5, "top_p": 0.5, "temperature": 1.2}
    server.complete(**penalties, top_k=3)
    greedy = server.complete(presence_penalty=1.5, repetition_penalty=1.3)
    said = server.complete(max_tokens=16).choices[0].text
    word = next(character for character in said if character.isascii() and character.isprintable())
    assert word not in server.complete(max_tokens=16, bad_words=[word]).choices[0].text
    only = server.complete(allowed_token_ids=[10], return_token_ids=True)
    assert only.choices[0].token_ids == [10] * 8
    wrong: tuple[dict[str, Any], ...] = (
        *({"allowed_token_ids": value} for value in ([], [-1], [10**7])),
        *({"temperature": -1}, {"top_p": 0}, {"top_k": -5}, {"min_p": 2}, {"n": 0}),
        *({"presence_penalty": 9}, {"repetition_penalty": 0}, {"max_tokens": -1}),
    )
    return [_texts(greedy), [server.refuses(server.complete, **each) for each in wrong]]


@like(SERVED, "tests/v1/e2e/general/test_min_tokens.py", "with stop, with eos, min = max")
def least_tokens(server: Server) -> Any:
    """Not even a stop string or the end of text ends an answer before."""
    whole = server.complete(max_tokens=16, return_token_ids=True, ignore_eos=True).choices[0]
    found = []
    for least in (1, 8, 16):
        answer = server.complete(
            max_tokens=16, min_tokens=least, stop_token_ids=whole.token_ids[:1]
        )
        assert least <= answer.usage.completion_tokens <= 16
        found.append([answer.usage.completion_tokens, answer.choices[0].text])
    return [*found, server.refuses(server.complete, min_tokens=17, max_tokens=16)]
