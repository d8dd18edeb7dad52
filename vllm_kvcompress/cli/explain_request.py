"""`vllm-kvcompress explain-request`: shows which tokens of one request every head keeps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_kvcompress import __version__
from vllm_kvcompress.cli.eval import add_engine_option
from vllm_kvcompress.cli.vllm_command import read_request
from vllm_kvcompress.config.auto import AUTO, NO_POLICY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags
from vllm_kvcompress.tools.files import check_writable, named, read_within, write_whole

_CHANGES_PROMPT = ("documents", "truncate_prompt_tokens", "prompt_embeds")  # and is left to servers
_EXPECTED = (
    'expected the body of a chat, {"messages": [...]}, or of a completion with one prompt, '
    '{"prompt": "..."}'
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the request, the settings of a server, and where the results go."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the prompt as text; or NAME.json, the body of a request to /v1/chat/completions or "
        "/v1/completions: the prompt, max_tokens, ignore_eos and vllm_xargs count",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face name or directory")
    add_flags(parser.add_argument_group("settings, as of serve"), Settings, "settings")
    add_engine_option(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="length limit of the answer (the body's, or 64)"
    )
    parser.add_argument("--layer", type=int, metavar="L", help="shade by this layer's heads (all)")
    parser.add_argument("--head", type=int, metavar="H", help="shade by these KV heads (all)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("request.html"),
        metavar="FILE",
        help="the page (request.html); the engine's log lies beside it",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also what every head keeps, by position"
    )


def run(arguments: argparse.Namespace) -> int:
    """Asks an engine the request, and writes the page."""
    body = read_body(arguments.file)
    chosen = {"policy": AUTO, **arguments.settings}
    settings = read_request(chosen, None, [arguments.model]).settings
    _check(settings, body)
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens {arguments.max_tokens}: expected at least 1.")
    body["max_tokens"] = arguments.max_tokens or body.get("max_tokens") or 64
    for path in filter(None, (arguments.out, arguments.json)):
        check_writable(path)
    from vllm_kvcompress.tools.engine_process import EngineProcess
    from vllm_kvcompress.tools.explanation.kept import explain
    from vllm_kvcompress.tools.explanation.page import html_page, why_whole

    section = None if settings is None else settings.to_dict()
    if settings is not None and "messages" in body:
        body["roles"] = settings.protect
    log = arguments.out.with_suffix(".log")
    with EngineProcess(arguments.model, section, dict(arguments.engine), log, explain) as engine:
        explanation = engine.call(body)
    shown = section or {"policy": NO_POLICY}
    explanation["model"] = arguments.model
    explanation["settings"] = {
        **shown,
        **{name: json.dumps(value) for name, value in (body.get("vllm_xargs") or {}).items()},
        **dict(arguments.engine),
        "max_tokens": body["max_tokens"],
        "vllm-kvcompress": __version__,
    }
    if arguments.json is not None:
        write_whole(arguments.json, json.dumps(explanation) + "\n")
    write_whole(arguments.out, html_page(explanation, arguments.layer, arguments.head))
    reason = why_whole(explanation)
    print(f"{arguments.out}: {'compressed' if reason is None else f'not compressed: {reason}'}")
    return 0


def read_body(path: Path) -> dict[str, Any]:
    """Reads a request: `prompt` or `messages`, with what else counts.

    Raises:
        FileError: there is no such file.
        ConfigError: it has no prompt, or more than one.
    """
    with named(path):
        try:
            text = read_within(path)
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: expected text in UTF-8; convert it.") from None
    if path.suffix != ".json":
        if not text:
            raise ConfigError(f"{path}: expected a prompt, found an empty file; write one.")
        return {"prompt": text}
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {_EXPECTED}, found no JSON ({error}); mend it.") from None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        found = (
            f"keys {', '.join(map(str, body))}" if isinstance(body, dict) else type(body).__name__
        )
        raise ConfigError(f"{path}: {_EXPECTED}, found {found}; give one of the two.")
    for name in _CHANGES_PROMPT:
        if body.get(name) is not None:
            raise ConfigError(f"{path}: {name} is not supported here; leave it out.")
    body["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens")
    for name, kind, what in (("max_tokens", int, "a number"), ("vllm_xargs", dict, "an object")):
        if not isinstance(body.get(name) or kind(), kind):
            raise ConfigError(f"{path}: {name}: expected {what}, found {body[name]!r}; mend it.")
    _check_prompt(path, body)
    return body


def _check_prompt(path: Path, body: dict[str, Any]) -> None:
    """Refuses a body without one prompt; takes the only one out of a list.

    Raises:
        ConfigError: says what was found.
    """
    name = "messages" if "messages" in body else "prompt"
    prompt = body[name]
    if name == "prompt" and isinstance(prompt, list) and len(prompt) == 1:
        body[name] = prompt = prompt if isinstance(prompt[0], int) else prompt[0]
    kind = dict if name == "messages" else int
    is_list = isinstance(prompt, list) and all(type(each) is kind for each in prompt)
    if not prompt or not (is_list or (isinstance(prompt, str) and name == "prompt")):
        expected = "a list of messages" if name == "messages" else "one text, or its token ids"
        raise ConfigError(
            f"{path}: {name}: expected {expected}, and not empty, found {json.dumps(prompt)[:80]}; "
            "give one prompt."
        )


def _check(settings: Settings | None, body: dict[str, Any]) -> None:
    """Refuses policies whose entries are no tokens, and options that a server would refuse.

    Raises:
        ConfigError: says what to do instead.
    """
    if settings is None:
        return
    from vllm_kvcompress.policies import resolve_settings
    from vllm_kvcompress.vllm_plugin.request_options import check_allowed, request_options

    check_allowed(request_options(body.get("vllm_xargs")), settings)
    for policy, pipeline in resolve_settings(settings).items():
        if pipeline.merger is not None and not pipeline.merger.corrects:
            raise ConfigError(
                f"{policy} merges evicted tokens into those that it keeps, so what a head holds is "
                "no part of the text; give a policy that only evicts."
            )
