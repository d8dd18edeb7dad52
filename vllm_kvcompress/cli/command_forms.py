"""Prints the plain vLLM command as a shell line, YAML, a chart's arguments or for Ray Serve."""

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

# An option's value: a switch, a text, several texts; or the texts of an option given repeatedly.
Given = bool | str | list[str] | tuple[str, ...]


@dataclass(frozen=True)
class PlainCommand:
    """A `vllm serve` command that does what `vllm-kvcompress serve` would.

    Attributes:
        arguments: of `vllm`, from `serve` on.
        model: the one among them; None: vLLM's default.
        options: all others, by their names without dashes.
        engine: those that an engine takes, too, by its names and with its types.
        environment: variables that vLLM's server needs; Ray Serve's does not.
    """

    arguments: list[str]
    model: str | None
    options: Mapping[str, Given]
    engine: Mapping[str, Any]
    environment: Mapping[str, str]

    def form(self, name: str) -> str:
        """Writes the command in one of `FORMS`.

        Raises:
            ConfigError: the form cannot express an option.
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
        """A list of arguments without quoted JSON: dictionaries become dotted options."""
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
    def server_options(self) -> list[str]:
        """Options that an engine does not take, such as the port."""
        return [name for name in self.options if name.replace("-", "_") not in self.engine]


def native(text: str) -> Any:
    """Parses a number or a dictionary; any other text, or another spelling, stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if isinstance(value, dict) or (is_number and str(value) == text) else text


def _dotted(prefix: str, value: object) -> list[str]:
    """`--a.b=1 --a.c=x` for a dictionary; empty where vLLM would parse another value."""
    if not isinstance(value, dict):
        return []
    arguments: list[str] = []
    for key, item in value.items():
        name = f"{prefix}.{key}"
        if isinstance(item, dict):
            words = _dotted(name, item)
        elif isinstance(item, list) and item and all(map(_is_list_item, item)):
            words = [f"{name}+={','.join(item)}"]
        else:
            is_word = isinstance(item, str) and bool(re.match(r"[A-Za-z_/.]", item))
            is_word = is_word and item not in ("true", "false", "null", "NaN", "Infinity")
            words = [f"{name}={item if is_word else json.dumps(item)}"]
        if not words or not re.fullmatch(r"[\w-]+", key):
            return []
        arguments += words
    return arguments


def _is_list_item(item: object) -> bool:
    return isinstance(item, str) and "," not in item


def _dumped(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)
