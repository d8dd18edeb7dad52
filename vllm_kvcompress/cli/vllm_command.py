"""Turns our options, a YAML file and vLLM's options into one plain `vllm serve` command.

Precedence, weakest first: what we fill in, the YAML file, the command line. Our own settings are
merged key by key over YAML and over a `kvcompress` section of `--additional-config`; vLLM itself
would replace the whole dictionary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_kvcompress.cli.loss_budget import resolve_budget
from vllm_kvcompress.config.auto import AUTO, NO_POLICY, profile_beside
from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import json_or_text
from vllm_kvcompress.tools.files import read_within

_ADDITIONAL = "--additional-config"
_MAX_YAML_BYTES = 2**20
_LIST_OPTION = "logits-processors"  # takes several values: ours joins the user's


@dataclass(frozen=True)
class ServeRequest:
    """A parsed `vllm-kvcompress serve` command line.

    Attributes:
        settings: how to compress; None serves stock vLLM.
        vllm_arguments: the user's arguments of `vllm serve`: the model first if it is known, then
            YAML's, then the command line's.
        additional_config: the user's own `--additional-config`, without our section.
        form: in which of `FORMS` the command is printed; None: it is run.
        status_page: whether the server has the page at /kvcompress.
    """

    settings: Settings | None
    vllm_arguments: list[str]
    additional_config: dict[str, Any] = field(default_factory=dict)
    form: str | None = None
    status_page: bool = True

    def command(
        self,
        plugin_options: Mapping[str, str],
        is_ours: Callable[[str, str], bool] = lambda name, value: False,
    ) -> list[str]:
        """Returns the arguments of `vllm`, from `serve` on.

        Args:
            plugin_options: options of vLLM, by name without dashes, that switch compression on.
            is_ours: whether the user's value of such an option, by its name, does the same.

        Raises:
            ConfigError: the user gave one of those options another value.
        """
        arguments = ["serve", *self.vllm_arguments]
        additional = dict(self.additional_config)
        if self.settings is not None:
            additional[SETTINGS_KEY] = self.settings.to_dict()
            for name, value in plugin_options.items():
                given = option_values(self.vllm_arguments, f"--{name}")[-1:]
                if name == _LIST_OPTION:
                    arguments = _add_to_list(arguments, f"--{name}", value)
                elif not given:
                    arguments += [f"--{name}", value]
                elif name != "block-size" and given != [value] and not is_ours(name, given[0]):
                    raise ConfigError(
                        f"--{name} {given[0]} takes the place where compression attaches to vLLM "
                        f"({value}); leave it out, or serve without --kv-policy."
                    )
        if additional:
            arguments += [_ADDITIONAL, _json_text(additional, _ADDITIONAL)]
        return arguments


def read_request(
    settings: Mapping[str, object], yaml_path: str | None, vllm_arguments: Sequence[str]
) -> ServeRequest:
    """Merges command line and YAML, and checks all that needs neither vLLM nor a model.

    Args:
        settings: those given by our flags, by their key in `Settings.from_dict`.
        yaml_path: the file given with `--config`, if any.
        vllm_arguments: the command line without our flags and `--config`.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong.
    """
    document = {} if yaml_path is None else _read_yaml(yaml_path)
    yaml_section = document.pop(SETTINGS_KEY, None)
    source = f"--config {yaml_path}: additional-config"
    yaml_additional = _additional(document.pop("additional-config", {}), source)
    additional, rest = _take_additional(vllm_arguments, yaml_additional)
    sections = [yaml_additional.get(SETTINGS_KEY), yaml_section, additional.pop(SETTINGS_KEY, None)]
    merged: dict[str, Any] = {}
    for section in (*sections, settings):
        if section is not None:
            section = _mapping(section, SETTINGS_KEY, "settings such as policy and budget")
            section = {str(key).replace("-", "_"): value for key, value in section.items()}
            merged = _deep_update(merged, section)
    arguments = _with_yaml(document, rest)
    return ServeRequest(_checked_settings(merged, arguments), arguments, additional)


def _checked_settings(merged: dict[str, Any], arguments: Sequence[str]) -> Settings | None:
    """Returns the settings; None serves stock vLLM.

    Raises:
        ConfigError: a setting is wrong, the profile is missing, or the plugin is not loaded.
    """
    if any(merged.get(name) for name in ("read", "draft", "prompts")):
        merged.setdefault("policy", NO_POLICY)
    elif not merged or (merged.get("policy") == NO_POLICY and not merged.get("request_policies")):
        return None
    is_first = arguments and not arguments[0].startswith("-")
    model = "".join(arguments[:1] if is_first else option_values(arguments, "--model")[-1:])
    if merged.get("policy") == AUTO and merged.get("profile") is None:
        merged["profile"] = profile_beside(model)
    settings = Settings.from_dict(resolve_budget(merged, model))
    if settings.profile is not None and not os.path.isfile(settings.profile):
        raise ConfigError(
            f"profile {settings.profile}: no such file; make one with `vllm-kvcompress profile`."
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    for name in (SETTINGS_KEY, *settings.plugins):
        if plugins is not None and name not in plugins.split(","):
            raise ConfigError(
                f"VLLM_PLUGINS={plugins} keeps vLLM from loading this plugin; add {name} to it, or "
                "unset it."
            )
    from vllm_kvcompress.policies import resolve_settings

    resolve_settings(settings)
    return settings


def _read_yaml(path: str) -> dict[str, Any]:
    """Reads a file's options, by their names with dashes; those without a value are left out."""
    try:
        text = read_within(Path(path), _MAX_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}); check the path.") from None
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not valid YAML ({reason}).") from None
    expected = f"options of vllm serve and a {SETTINGS_KEY} section"
    options = _mapping({} if document is None else document, f"--config {path}", expected)
    return {str(key).replace("_", "-"): v for key, v in options.items() if v is not None}


def _with_yaml(document: dict[str, Any], arguments: list[str]) -> list[str]:
    """Puts YAML's options, as vLLM would, before the command line's and behind the model."""
    model = [str(document.pop("model"))] if "model" in document else []
    if arguments and not arguments[0].startswith("-"):
        model, arguments = arguments[:1], arguments[1:]
    from_yaml: list[str] = []
    for key, value in document.items():
        name = f"--{key}"
        if isinstance(value, bool):
            from_yaml.append(name if value else f"--no-{key}")
        elif isinstance(value, list):
            from_yaml += [name, *map(str, value)] if value else []
        else:
            from_yaml += [name, _json_text(value, name) if isinstance(value, dict) else str(value)]
    return [*model, *from_yaml, *arguments]


def option_values(arguments: Sequence[str], name: str) -> list[str]:
    """Values given for an option, as `--name value` or `--name=value`, with - or _."""
    return [value for _, option, value in _options(arguments) if option == name]


def _options(arguments: Sequence[str]) -> list[tuple[int, str, str]]:
    """(index, name, value) of every argument that looks like an option."""
    options = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            option, dot, keys = name.partition(".")
            if not equals:
                value = arguments[index + 1] if index + 1 < len(arguments) else ""
            options.append((index, option.replace("_", "-") + dot + keys, value))
    return options


def _add_to_list(arguments: list[str], name: str, value: str) -> list[str]:
    """Puts a value in front of those of an option that takes several; the last one counts."""
    for index, option, given in reversed(_options(arguments)):
        if option == name:
            rest = [given] if "=" in arguments[index] else []
            return [*arguments[:index], name, value, *rest, *arguments[index + 1 :]]
    return [*arguments, name, value]


def _take_additional(
    arguments: Sequence[str], additional: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Takes `--additional-config JSON` and `--additional-config.key value` out of arguments.

    Returns:
        The JSON, or `additional` where there is none, with the dotted keys; and what is left.
    """
    dotted: dict[str, Any] = {}
    taken: set[int] = set()
    for index, name, value in _options(arguments):
        option, dot, keys = name.partition(".")
        if option != _ADDITIONAL:
            continue
        taken |= {index} if "=" in arguments[index] else {index, index + 1}
        if not dot:
            additional = _additional(value, _ADDITIONAL)
            continue
        nested: Any = json_or_text(value)
        for key in reversed(keys.split(".")):
            nested = {key: nested}
        dotted = _deep_update(dotted, nested)
    rest = [argument for index, argument in enumerate(arguments) if index not in taken]
    return _deep_update(additional, dotted), rest


def _additional(value: object, source: str) -> dict[str, Any]:
    """An `additional-config` that was given as JSON, or in YAML as a section."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not valid JSON ({error}); found {value!r}.") from None
    return _mapping(value, source, "a JSON object")


def _mapping(value: object, source: str, expected: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source}: expected {expected}, found {value!r}.")
    return dict(value)


def _json_text(value: object, source: str) -> str:
    """Writes a value as JSON, which cannot hold all that YAML can."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: expected what can be written as JSON ({error}).") from None


def _deep_update(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in update.items():
        former = result.get(key)
        if isinstance(former, dict) and isinstance(value, Mapping):
            result[key] = _deep_update(former, value)
        else:
            result[key] = value
    return result
