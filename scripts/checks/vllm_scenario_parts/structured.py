"""Structured outputs and tools over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

from vllm_scenario_parts.chats import CHAT
from vllm_scenario_parts.completions import COMPLETION
from vllm_scenario_parts.scenario import LONG, Registry, Server, like

SERVED: Registry = []
GENERATE = "tests/v1/entrypoints/llm/test_struct_output_generate.py"
TOOLS = "tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py"
CHOICES = ["Python", "Java", "Rust", "C++"]
ADDRESS = r"((25[0-5]|2[0-4]\d|1\d\d|\d?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|\d?\d)"
SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"type": "string", "enum": CHOICES},
        "grade": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["language", "grade", "tags"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " column " from " table\ncolumn ::= "c1" | "c2"\ntable ::= "t1" | "t2"'
ENOUGH = 120
WRONG: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"foo": "bar"}}},
    {"regex": "[.*"},
    {"grammar": "root ::= nothing_that_is_there"},
    {"regex": {"1": "Python"}},
    {"choice": []},
    {"regex": "a", "choice": ["a"]},
)


def fits(text: str) -> bool:
    """Returns whether a text fits `SCHEMA`."""
    answer = json.loads(text)
    if not isinstance(answer, dict):
        return False
    tags = answer.get("tags", [])
    return (
        answer.keys() == {"language", "grade", "tags"}
        and answer["language"] in CHOICES
        and 1 <= answer["grade"] <= 9
        and 1 <= len(tags) <= 3
        and {*tags} <= {"a", "b"}
    )


def _both(server: Server, **outputs: Any) -> list[str]:
    """Asks for a completion, a chat and a streamed chat in one form; streams must agree."""
    settings = {"structured_outputs": outputs, "max_tokens": ENOUGH}
    answer = server.chat(LONG, **settings).choices[0].message.content
    chunks = server.chat(LONG, **settings, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer
    return [server.complete(LONG, **settings).choices[0].text, answer]


@like(SERVED, CHAT, "test_structured_outputs_choice_chat")
@like(SERVED, GENERATE, "test_structured_output (choice)")
def choice(server: Server) -> Any:
    answers = _both(server, choice=CHOICES)
    assert {*answers} <= {*CHOICES}
    return answers


@like(SERVED, CHAT, "test_structured_outputs_regex_chat")
@like(SERVED, GENERATE, "test_structured_output (regex)")
def regex(server: Server) -> Any:
    answers = _both(server, regex=ADDRESS)
    assert all(re.fullmatch(ADDRESS, text) for text in answers)
    return answers


@like(SERVED, CHAT, "test_structured_outputs_json_chat")
@like(SERVED, GENERATE, "test_structured_output (json)")
def json_schema(server: Server) -> Any:
    answers = _both(server, json=SCHEMA)
    assert all(map(fits, answers))
    return answers


@like(SERVED, GENERATE, "test_structured_output (grammar)")
def grammar(server: Server) -> Any:
    answers = _both(server, grammar=GRAMMAR)
    assert all(re.fullmatch("SELECT c[12] from t[12]", text) for text in answers)
    return answers


@like(SERVED, GENERATE, "test_structured_output_with_structural_tag")
def structural_tag(server: Server) -> Any:
    """Text between two tags follows a schema."""
    tag = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
    said = {"type": "structural_tag", "structures": [tag], "triggers": ["<f>"]}
    answer = server.complete(structured_outputs={"structural_tag": json.dumps(said)}, max_tokens=12)
    return answer.choices[0].text


@like(SERVED, CHAT, "test_structured_outputs_choice_chat_logprobs")
def choice_with_logprobs(server: Server) -> Any:
    """No logprob is lower than JSON and OpenAI's clients accept."""
    said = server.chat(
        structured_outputs={"choice": CHOICES}, logprobs=True, top_logprobs=5
    ).choices[0]
    values = [each.logprob for place in said.logprobs.content for each in place.top_logprobs]
    assert min(values) >= -9999.0
    return values


@like(
    *(SERVED, CHAT, "test_response_format_json_object", "test_response_format_json_schema"),
    "test_response_format_text",
)
def response_format(server: Server) -> Any:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    said = server.chat(response_format=schema, max_tokens=ENOUGH).choices[0].message.content
    assert fits(said)
    text = server.chat(response_format={"type": "text"}).choices[0].message.content
    assert text == server.chat().choices[0].message.content
    anything = server.chat(response_format={"type": "json_object"}, max_tokens=4).choices[0]
    assert anything.message.content.lstrip().startswith("{")
    return [said, text, anything.message.content]


@like(SERVED, COMPLETION, "test_invalid_json_schema", "test_invalid_regex", "test_invalid_grammar")
@like(SERVED, CHAT, "test_structured_outputs_type_error")
def forms_that_are_none(server: Server) -> Any:
    """Invalid grammars are refused, and the server works afterwards."""
    kinds = [server.refuses(server.complete, structured_outputs=each) for each in WRONG]
    assert choice(server)
    return kinds


@like(SERVED, TOOLS, "test_function_tool_use (named)")
def tools(server: Server) -> Any:
    """A named tool is called; vLLM holds only strict tools to their schema."""
    function = {"name": "grade", "description": "Grades.", "parameters": SCHEMA}
    named = {"type": "function", "function": {"name": "grade"}}
    answer = server.chat(
        LONG,
        tools=[{"type": "function", "function": function}],
        tool_choice=named,
        max_tokens=ENOUGH,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "grade"
    json.loads(call.function.arguments)
    return call.function.arguments
