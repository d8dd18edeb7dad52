"""Scenarios of completions over HTTP."""

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
    """Returns a stream's texts and finish reasons by choice; the reason comes in the last part."""
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
    """Texts and token ids are accepted as prompts."""
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
    """Prompts are truncated from the left if they are too long."""
    answers = []
    for most in (4, 60, 500):
        answer = server.complete(
            [*range(10, 110)], truncate_prompt_tokens=most, return_token_ids=True
        )
        kept = answer.choices[0].prompt_token_ids
        assert kept == [*range(10, 110)][-most:]
        answers.append(answer.choices[0].token_ids)
    return answers


@like(SERVED, COMPLETION, "test_no_logprobs", "test_zero_logprobs", "test_some_logprobs")
def logprobs(server: Server) -> Any:
    """Without `logprobs` none come; with 0 the token's own, with 5 five more."""
    assert server.complete().choices[0].logprobs is None
    by_number = []
    for number in (0, 5):
        said = server.complete(logprobs=number).choices[0].logprobs
        assert all(1 <= len(top) <= number + 1 for top in said.top_logprobs)
        assert len(said.tokens) == len(said.token_logprobs) == len(said.text_offset)
        by_number.append([said.tokens, said.token_logprobs])
    assert by_number[0][0] == by_number[1][0]
    return by_number


@like(SERVED, COMPLETION, "test_too_many_completion_logprobs")
def too_many_logprobs(server: Server) -> Any:
    """More logprobs than allowed are refused, streamed too; the server works afterwards."""
    kinds = [
        server.refuses(server.complete, logprobs=21),
        server.refuses(server.complete, logprobs=30, stream=True),
    ]
    return [*kinds, _texts(server.complete())]


@like(SERVED, COMPLETION, "test_prompt_logprobs_completion")
def prompt_logprobs(server: Server) -> Any:
    """Two prompts have their own prompt logprobs; a negative number is refused."""
    by_prompt = []
    for number in (0, 1):
        for choice in server.complete([LONG, SHORT], prompt_logprobs=number).choices:
            assert choice.prompt_logprobs[0] is None
            of_tokens = choice.prompt_logprobs[1:]
            assert len(of_tokens) == (199, 14)[choice.index]
            by_prompt.append([[each["logprob"] for each in place.values()] for place in of_tokens])
    assert server.complete([LONG, SHORT]).choices[0].prompt_logprobs is None
    return [by_prompt, server.refuses(server.complete, prompt_logprobs=-5)]


@like(SERVED, COMPLETION, "test_completion_streaming")
def streamed(server: Server) -> Any:
    unstreamed = server.complete().choices[0]
    (text,), (reason,) = _streamed(server.complete(stream=True))
    assert (text, reason) == (unstreamed.text, unstreamed.finish_reason)
    return text


@like(SERVED, COMPLETION, "test_parallel_no_streaming", "test_parallel_streaming")
@like(SERVED, SAMPLING, "test_n_gt_1", "test_seed")
def several_choices(server: Server) -> Any:
    """Seeded choices differ from each other and from other seeds, and repeat."""
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
    """Usage comes at the end of a stream, in every part or never; only with a stream."""

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
    """Several prompts in one request, as texts and tokens, with choices and streams."""
    texts = []
    for prompts in ([LONG] * 2, [[10] * 80] * 2):
        one, other = _texts(server.complete(prompts))
        assert one == other
        (streamed_one, streamed_other), _ = _streamed(server.complete(prompts, stream=True), 2)
        assert streamed_one == streamed_other == one
        assert len(server.complete(prompts, n=2, temperature=0.7).choices) == 4
        texts.append(one)
    return texts


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
    """Echo puts the prompt and its logprobs before the answer."""
    echoes = []
    for number in (1, 0):
        choice = server.complete(LONG, echo=True, logprobs=number, ignore_eos=True).choices[0]
        said = choice.logprobs
        assert choice.text.startswith(LONG)
        assert len(said.tokens) == len(said.text_offset) == len(said.top_logprobs) == 208
        assert said.token_logprobs[0] is None
        assert said.top_logprobs[0] is None
        assert all(1 <= len(top) <= number + 1 for top in said.top_logprobs[1:])
        assert said.text_offset[:200] == [*range(200)]
        echoes.append([choice.text, said.token_logprobs])
    return echoes


@like(SERVED, VALIDATION, "test_empty_prompt", "test_out_of_vocab_token_ids")
@like(SERVED, "tests/entrypoints/openai/completion/test_empty_prompt_list.py", "an empty list")
def prompts_that_are_none(server: Server) -> Any:
    """Empty prompts, unknown tokens and prompts beyond max_model_len are refused."""
    prompts: tuple[Any, ...] = ([], [[]], None, [999999], [-1], [10] * 2000, ["a", [10]])
    return [server.refuses(server.complete, prompt=prompt) for prompt in prompts]


@like(SERVED, SAMPLING, "test_stop", "test_stop_token_ids")
def stops(server: Server) -> Any:
    """Answers end before a stop text, behind it if included, or at a stop token."""
    unstopped = server.complete(max_tokens=16, return_token_ids=True, ignore_eos=True).choices[0]
    word, token = unstopped.text[6:8], unstopped.token_ids[6]
    before = unstopped.text[: unstopped.text.index(word)]
    choice = server.complete(max_tokens=16, stop=[word], ignore_eos=True).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", word)
    with_it = server.complete(
        max_tokens=16, stop=[word], include_stop_str_in_output=True, ignore_eos=True
    )
    assert _texts(with_it) == [before + word]
    at_token = server.complete(
        max_tokens=16, stop_token_ids=[token], return_token_ids=True, ignore_eos=True
    ).choices[0]
    first = unstopped.token_ids.index(token)
    assert at_token.token_ids == unstopped.token_ids[: first + 1]
    assert (at_token.finish_reason, at_token.stop_reason) == ("stop", token)
    return [unstopped.text, before]


@like(SERVED, SAMPLING, "test_penalties", "test_bad_words", "test_allowed_token_ids")
def other_parameters(server: Server) -> Any:
    """Penalties, bad words and allowed tokens work; wrong values are refused."""
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
    """No stop string or end of text ends an answer before `min_tokens`."""
    unstopped = server.complete(max_tokens=16, return_token_ids=True, ignore_eos=True).choices[0]
    answers = []
    for least in (1, 8, 16):
        answer = server.complete(
            max_tokens=16, min_tokens=least, stop_token_ids=unstopped.token_ids[:1]
        )
        assert least <= answer.usage.completion_tokens <= 16
        answers.append([answer.usage.completion_tokens, answer.choices[0].text])
    return [*answers, server.refuses(server.complete, min_tokens=17, max_tokens=16)]
