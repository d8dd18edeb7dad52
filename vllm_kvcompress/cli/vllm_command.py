"""Turns our options, a YAML file and vLLM's options into one plain `vllm serve` command.

Precedence, weakest first: what we fill in, the YAML file, the command line. Our own settings are
merged key by key over YAML and over a `kvcompress` section of `--additional-config`; vLLM itself
would replace the whole dictionary.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_kvcompress.config import AUTO, NO_POLICY, PROMPTS_PLUGIN, SETTINGS_KEY, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import json_or_text
from vllm_kvcompress.tools.files import read_within
from vllm_kvcompress.tools.model_folder import profile_beside

_ADDITIONAL = "--additional-config"
_MOST_YAML_BYTES = 2**20
_LIST_OPTION = "logits-processors"  # takes several values: ours joins the user's


@dataclass(frozen=True)
class ServeRequest:
    """What the user asked for, sorted out.

    Attributes:
        settings: how to compress; None serves stock vLLM.
        vllm_arguments: the arguments of `vllm serve` that came from the user: the model first if
            it is known, then YAML's, then the command line's.
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
        """The arguments of `vllm`, from `serve` on.

        Args:
            plugin_options: options of vLLM, by name without dashes, that switch compression on.
            is_ours: whether a value of such an option, by its name, does the same and may stay.

        Raises:
            ConfigError: the user gave one of those options another value.
        """
        arguments = ["serve", *self.vllm_arguments]
        additional = dict(self.additional_config)
        if self.settings is not None:
            additional[SETTINGS_KEY] = self.settings.to_dict()
            for name, value in plugin_options.items():
                if name == _LIST_OPTION:
                    arguments = _add_to_list(arguments, f"--{name}", value)
                    continue
                given = option_values(self.vllm_arguments, f"--{name}")[-1:]
                if not given:
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
    flags: Mapping[str, object], yaml_path: str | None, vllm_arguments: Sequence[str]
) -> ServeRequest:
    """Merges command line and YAML, and checks all that needs neither vLLM nor a model.

    Args:
        flags: our settings on the command line, by their key in `Settings.from_dict`.
        yaml_path: the file given with `--config`, if any.
        vllm_arguments: the command line without our flags and `--config`.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong.
    """
    document = _read_yaml(yaml_path) if yaml_path is not None else {}
    own_section = document.pop(SETTINGS_KEY, None)
    yaml_additional: dict[str, Any] = {}
    for key in ("additional-config", "additional_config"):
        yaml_additional = _mapping(document.pop(key, None), yaml_path) or yaml_additional
    cli_additional, dotted, rest = _take_additional(vllm_arguments)
    additional = dict(yaml_additional if cli_additional is None else cli_additional)
    sections = [yaml_additional.get(SETTINGS_KEY), own_section, additional.pop(SETTINGS_KEY, None)]
    merged: dict[str, Any] = {}
    for section in (*sections, dotted.pop(SETTINGS_KEY, None), flags):
        merged = _deep_update(merged, _section(section))
    arguments = _with_yaml(document, rest)
    settings = _settings(merged, arguments)
    return ServeRequest(settings, arguments, _deep_update(additional, dotted))


def _settings(merged: dict[str, Any], arguments: Sequence[str]) -> Settings | None:
    """The checked settings; None for no policy."""
    chosen_by_requests = merged.get("request_policies")
    if merged.get("read") is not None or merged.get("prompts"):
        merged.setdefault("policy", NO_POLICY)
    elif not merged or (merged.get("policy") == NO_POLICY and not chosen_by_requests):
        return None
    if merged.get("policy") == AUTO and merged.get("profile") is None:
        is_first = arguments and not arguments[0].startswith("-")
        model = arguments[:1] if is_first else option_values(arguments, "--model")[-1:]
        merged["profile"] = profile_beside("".join(model))
    settings = Settings.from_dict(merged)
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    """Refuses a missing profile, a hidden plugin, and policies that cannot work."""
    if settings.profile is not None and not os.path.isfile(settings.profile):
        raise ConfigError(
            f"profile {settings.profile}: no such file; make one with `vllm-kvcompress profile`."
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    needed = (SETTINGS_KEY, PROMPTS_PLUGIN) if settings.prompts is not None else (SETTINGS_KEY,)
    for name in needed if plugins is not None else ():
        if name not in str(plugins).split(","):
            raise ConfigError(
                f"VLLM_PLUGINS={plugins} keeps vLLM from loading this plugin; add {name} to it, or "
                "unset it."
            )
    from vllm_kvcompress.policies import resolve_settings

    resolve_settings(settings)


def _section(value: object) -> dict[str, Any]:
    """A section of settings with their names as `Settings` has them."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{SETTINGS_KEY}: expected settings such as policy and budget, found {value!r}."
        )
    return {str(key).replace("-", "_"): item for key, item in value.items()}


def _mapping(value: object, source: str | None) -> dict[str, Any]:
    """YAML's `additional-config`, as text or not."""
    if isinstance(value, str):
        return _json_object(value)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{source}: additional-config: expected a section, found {value!r}.")
    return value or {}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = read_within(Path(path), _MOST_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}); check the path.") from None
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not valid YAML ({reason}).") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"--config {path}: expected options of vllm serve and a {SETTINGS_KEY} section, "
            f"found {type(document).__name__}."
        )
    return document


def _with_yaml(document: dict[str, Any], arguments: list[str]) -> list[str]:
    """YAML's options in front of the command line's, the model first."""
    model = document.pop("model", None)
    if arguments and not arguments[0].startswith("-"):
        return [arguments[0], *_yaml_arguments(document), *arguments[1:]]
    head = [str(model)] if model is not None else []
    return [*head, *_yaml_arguments(document), *arguments]


def _yaml_arguments(document: Mapping[str, Any]) -> list[str]:
    """YAML options as vLLM would turn them into arguments."""
    arguments: list[str] = []
    for key, value in document.items():
        name = f"--{str(key).replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            arguments.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, list):
            arguments += [name, *map(str, value)] if value else []
        elif isinstance(value, dict):
            arguments += [name, _json_text(value, name)]
        else:
            arguments += [name, str(value)]
    return arguments


def option_values(arguments: Sequence[str], name: str) -> list[str]:
    """Values given for an option, as `--name value` or `--name=value`, with - or _."""
    return [value for _, option, value in _options(arguments) if option == name]


def _options(arguments: Sequence[str]) -> list[tuple[int, str, str]]:
    """(index, name, value) of every argument that looks like an option."""
    found = []
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument.partition("=")
        path = re.match(r"--[^.]*", name)
        assert path is not None
        name = path.group().replace("_", "-") + name[path.end() :]
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        found.append((index, name, value))
    return found


def _add_to_list(arguments: list[str], name: str, value: str) -> list[str]:
    """Puts a value in front of those of an option that takes several; the last one counts."""
    for index, option, given in reversed(_options(arguments)):
        if option == name:
            rest = [given] if "=" in arguments[index] else []
            return [*arguments[:index], name, value, *rest, *arguments[index + 1 :]]
    return [*arguments, name, value]


def _take_additional(
    arguments: Sequence[str],
) -> tuple[dict[str, Any] | None, dict[str, Any], list[str]]:
    """Takes `--additional-config JSON` and `--additional-config.key value` out.

    Returns:
        The JSON's dictionary (None: not given), the dotted keys as one, and what is left.
    """
    whole: dict[str, Any] | None = None
    dotted: dict[str, Any] = {}
    taken: set[int] = set()
    for index, name, value in _options(arguments):
        if name != _ADDITIONAL and not name.startswith(f"{_ADDITIONAL}."):
            continue
        taken |= {index} if "=" in arguments[index] else {index, index + 1}
        if name == _ADDITIONAL:
            whole = _json_object(value)
        else:
            keys = name.removeprefix(f"{_ADDITIONAL}.").split(".")
            nested: Any = json_or_text(value)
            for key in reversed(keys):
                nested = {key: nested}
            dotted = _deep_update(dotted, nested)
    return whole, dotted, [a for index, a in enumerate(arguments) if index not in taken]


def _json_text(value: object, source: str) -> str:
    """A value as JSON; YAML knows some that are none."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: expected what can be written as JSON ({error}).") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_ADDITIONAL}: not valid JSON ({error}); found {text!r}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{_ADDITIONAL}: expected a JSON object, found {text!r}.")
    return value


def _deep_update(base: dict[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in update.items():
        former = result.get(key)
        both = isinstance(former, dict) and isinstance(value, Mapping)
        result[key] = _deep_update(former, value) if both else value  # type: ignore[arg-type]
    return result
