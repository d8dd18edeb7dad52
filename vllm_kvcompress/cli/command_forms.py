"""The plain vLLM command, in the forms that deployments want it in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from vllm_kvcompress.errors import ConfigError

SHELL, YAML, ARGS, RAY = "shell", "yaml", "args", "ray"
FORMS = (SHELL, YAML, ARGS, RAY)

# What was given for an option: a switch, a text, several texts; a tuple: it was given that often.
Given = bool | str | list[str] | tuple[str, ...]


@dataclass(frozen=True)
class PlainCommand:
    """What starts vLLM as `vllm-kvcompress serve` would.

    Attributes:
        arguments: of `vllm`, from `serve` on.
        model: the one among them; None: vLLM's default.
        options: all others, by their names without dashes.
        engine: what of these an engine takes, by its own names and of its own types.
        environment: variables that have to be set, for vLLM's server; Ray Serve's adds no routes.
    """

    arguments: list[str]
    model: str | None
    options: Mapping[str, Given]
    engine: Mapping[str, Any]
    environment: Mapping[str, str]

    def form(self, name: str) -> str:
        """The command as `name`, one of `FORMS`, says.

        Raises:
            ConfigError: that form has no words for it.
        """
        if name == SHELL:
            variables = [f"{key}={value}" for key, value in self.environment.items()]
            return shlex.join([*variables, "vllm", *self.arguments]) + "\n"
        if name == RAY:
            return self._ray()
        comment = "".join(f"# in the environment: {k}={v}\n" for k, v in self.environment.items())
        return comment + (self._config() if name == YAML else self._chart_arguments())

    def _config(self) -> str:
        """A file for `vllm serve --config`."""
        document: dict[str, Any] = {} if self.model is None else {"model": self.model}
        for name, given in self.options.items():
            if isinstance(given, tuple) and len(given) > 1:
                raise ConfigError(
                    f"--{name} is given {len(given)} times, which vLLM's YAML cannot say; "
                    f"use --print-vllm-command={ARGS}."
                )
            if given is False:  # which vLLM leaves out when it reads the file for `serve`
                name, given = f"no-{name}", True
            value = given[0] if isinstance(given, tuple) else given
            document[name] = native(value) if isinstance(value, str) else value
        return _dumped(document)

    def _chart_arguments(self) -> str:
        """A list of arguments without a quoted JSON: dictionaries become dotted options."""
        arguments = [] if self.model is None else [self.model]
        for name, given in self.options.items():
            if isinstance(given, bool):
                arguments.append(f"--{name}" if given else f"--no-{name}")
            elif isinstance(given, tuple):
                arguments += [f"--{name}={value}" for value in given]
            elif isinstance(given, list):
                arguments += [f"--{name}", *given]
            else:
                arguments += _dotted(f"--{name}", native(given)) or [f"--{name}={given}"]
        return _dumped(arguments)

    def _ray(self) -> str:
        """The arguments of Ray Serve's `LLMConfig`."""
        engine = dict(self.engine)
        names = engine.pop("served_model_name", None) or [self.model]
        model = {"model_id": names[0], "model_source": self.model}
        return _dumped({"model_loading_config": model, "engine_kwargs": engine})

    @property
    def of_the_server(self) -> list[str]:
        """Options that no engine takes, such as the port; Ray Serve has its own."""
        return [name for name in self.options if name.replace("-", "_") not in self.engine]


def native(text: str) -> Any:
    """A number or a dictionary where a text is exactly that, and else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if isinstance(value, dict) or (is_number and str(value) == text) else text


def _dotted(prefix: str, value: object) -> list[str]:
    """`--a.b=1 --a.c=x` for a dictionary; nothing where vLLM would read them otherwise."""
    if not isinstance(value, dict) or not value:
        return []
    arguments = []
    for key, item in value.items():
        if not re.fullmatch(r"[\w-]+", key):
            return []
        name = f"{prefix}.{key}"
        if isinstance(item, dict):
            inner = _dotted(name, item)
            if not inner:
                return []
            arguments += inner
        elif isinstance(item, list) and item and all(map(_is_list_item, item)):
            arguments.append(f"{name}+={','.join(item)}")
        else:
            text = item if isinstance(item, str) and _is_plain(item) else json.dumps(item)
            arguments.append(f"{name}={text}")
    return arguments


def _is_plain(text: str) -> bool:
    """Whether vLLM reads an unquoted text as that text, and not as JSON or as a number."""
    return bool(re.match(r"[A-Za-z_/.]", text)) and text not in (
        *("true", "false", "null", "NaN", "Infinity"),
    )


def _is_list_item(item: object) -> bool:
    return isinstance(item, str) and "," not in item


def _dumped(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)
