"""Options stated once: a field of a model has an option's name, type, default, bounds and help.

Flags, keys of YAML and JSON, errors and the tables in the docs follow from the fields.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from vllm_kvcompress.errors import ConfigError

MAX_TOKENS = 2**53  # the largest integer that all JSON readers keep exact


def option(default: Any, help: str, metavar: str = "", **more: Any) -> Any:
    """Makes a field of `Options`.

    Args:
        default: its default; `...` if it is required.
        help: one sentence in Markdown, for `--help` and the docs.
        metavar: stands for the value in `--help`.
        more: `flag`, the flag's name where it is not the field's; `const`, the value of a flag
            without one; `repeats`, the flag may be given several times; `example`, a value for
            errors; all else goes to pydantic's `Field`.
    """
    flag = {key: more.pop(key, None) for key in ("flag", "const", "repeats", "example")}
    extra = {"metavar": metavar, **flag}
    return Field(default, description=help, json_schema_extra=extra, **more)


class Options(BaseModel):
    """Base class of options that users give, frozen and checked.

    Attributes:
        name: the section's name in errors.
        flags: prefix of every flag; empty: there are no flags.
        prefix: what stands before every field's name in the user's keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    flags: ClassVar[str] = ""
    prefix: ClassVar[str] = ""

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Checks options by their names, as YAML, JSON or flags give them; None is the default.

        Raises:
            ConfigError: an unknown or missing name, or a value that cannot work.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(" ".join(_messages(cls, error))) from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form without defaults; `from_dict` of it gives equal options."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def __hash__(self) -> int:
        return hash(tuple(value for _, value in self if not isinstance(value, dict)))

    @model_validator(mode="before")
    @classmethod
    def _normalize_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {str(key).replace("-", "_"): v for key, v in values.items() if v is not None}

    @classmethod
    def flag(cls, field: str) -> str:
        """Returns the flag of a field, such as --kv-budget; one that is on has a --no- flag."""
        name = flag_details(cls.model_fields[field])["flag"] or field
        flag = cls.flags + name.replace("_", "-")
        return flag.replace("--", "--no-", 1) if cls.model_fields[field].default is True else flag


def add_flags(
    parser: argparse._ActionsContainer,
    options: type[Options],
    dest: str,
    fields: Iterable[str] = (),
) -> None:
    """Adds the flags of fields; a field that is a section of its own has none.

    Args:
        parser: a parser or a group of one.
        options: the model with the fields.
        dest: the namespace's dictionary for given values, by the fields' names.
        fields: names of fields; none: all.
    """
    parser.set_defaults(**{dest: {}})
    for name in fields or options.model_fields:
        field = options.model_fields[name]
        details, is_switch = flag_details(field), bool in _types(field)
        if not details["metavar"] and not is_switch:
            continue
        parser.add_argument(
            options.flag(name),
            action=_StoreOption,
            dest=dest,
            default=argparse.SUPPRESS,
            field=(name, field),
            nargs=0 if is_switch else "?" if details["const"] else None,
            const=field.default is not True if is_switch else details["const"],
            metavar=details["metavar"] or None,
            help=re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", help_text(field)).replace("%", "%%"),
        )


class _StoreOption(argparse.Action):
    """Stores a flag's value in the dictionary of given values."""

    def __init__(self, field: tuple[str, FieldInfo], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.name, self.field = field

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given, types = getattr(namespace, self.dest), _types(self.field)
        value = self.const if self.nargs == 0 else values
        if dict in types:
            value = given.get(self.name, {}) | dict([assignment(str(option_string), value)])
        elif flag_details(self.field)["repeats"]:
            value = value.replace("\\n", "\n").replace("\\t", "\t")
            value = [*given.get(self.name, ()), value]
        elif types & {int, float}:
            value = parse_number(value)
        setattr(namespace, self.dest, given | {self.name: value})


def check_limits(flag: str, lowest: float | None, highest: float | None) -> None:
    """Checks the limits of what requests choose: none, or two fractions in order.

    Raises:
        ValueError: they are not; in `flag`, braces stand for min and max.
    """
    fractions = [limit for limit in (lowest, highest) if isinstance(limit, float)]
    if (lowest, highest) != (None, None) and (len(fractions) < 2 or fractions[0] > fractions[1]):
        low, high = flag.format("min"), flag.format("max")
        raise ValueError(
            f"{low} {lowest}, {high} {highest}: expected both, as fractions in this order, such as "
            f"{low} 0.1 {high} 0.5."
        )


def check_choice(key: str, value: float, lowest: float | None, highest: float | None) -> None:
    """Checks a request's number against the operator's limits; without limits none is allowed.

    Raises:
        ConfigError: the operator does not allow it.
    """
    if lowest is None or highest is None:
        raise ConfigError(
            f"vllm_xargs {key} {value:g}: this server lets no request choose; leave it out."
        )
    if not lowest <= value <= highest:
        raise ConfigError(
            f"vllm_xargs {key} {value:g}: this server allows {lowest:g} to {highest:g}."
        )


def help_text(field: FieldInfo) -> str:
    """Returns a field's help and default, in Markdown."""
    default = field.get_default(call_default_factory=True)
    is_said = field.is_required() or isinstance(default, bool) or default in (None, (), {})
    return str(field.description) if is_said else f"{field.description} (default {default})"


def flag_details(field: FieldInfo) -> dict[str, Any]:
    """Returns the metavar, flag, const, repeats and example that `option` was given."""
    assert isinstance(field.json_schema_extra, dict), "a field that option() did not make"
    return field.json_schema_extra


def parse_number(text: str) -> float | int | str:
    """Parses an int or a float; any other text is returned as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def json_or_text(text: str) -> Any:
    """Parses a JSON value; text that is not JSON is returned as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def assignment(flag: str, text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, where a value is a number, true, false or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"{flag} {text}: expected NAME=VALUE; write for example {flag} a=0.5.")
    parsed = json_or_text(value)
    return name, parsed if isinstance(parsed, int | float) else value


def _types(field: FieldInfo) -> set[Any]:
    """The types of a field's values; a container's without its items'."""
    kinds = get_args(field.annotation)
    kinds = kinds if type(None) in kinds else (field.annotation,)
    return {getattr(kind, "__origin__", kind) for kind in kinds}


def _messages(options: type[Options], error: ValidationError) -> Iterator[str]:
    """One sentence for every wrong option: what was expected, what came, what to do."""
    refused: set[Any] = set()
    for detail in error.errors(include_url=False):
        owner, path = options, list(map(str, detail["loc"]))
        while len(path) > 1 and (section := _section(owner, path[0])) is not None:
            owner, path = section, path[1:]
        if (owner, *path[:1]) not in refused:  # pydantic has an error for each type of an option
            refused.add((owner, *path[:1]))
            yield _message(owner, path, detail)


def _section(options: type[Options], name: str) -> type[Options] | None:
    types = _types(options.model_fields[name]) if name in options.model_fields else ()
    return next((t for t in types if isinstance(t, type) and issubclass(t, Options)), None)


def _message(options: type[Options], path: list[str], detail: Any) -> str:
    kind, value = detail["type"], detail["input"]
    reason = str(detail["ctx"]["error"]) if kind == "value_error" else ""
    if not path:
        return reason or f"{options.name}: expected names with values, found {value!r}."
    name = options.prefix + path[0]
    if kind == "extra_forbidden":
        names = ", ".join(sorted(options.prefix + field for field in options.model_fields))
        return f"{options.name}: {name} is not known; valid are {names}."
    label = f"{name} ({options.flag(path[0])})" if options.flags else f"{options.name} {name}"
    if reason:
        return f"{label}: {reason}"
    example = flag_details(options.model_fields[path[0]])["example"]
    remedy = "leave it out for the default" if example is None else f"give for example {example}"
    if kind == "missing":
        return f"{options.name}: {label} is missing; {remedy}."
    expected = detail["msg"].partition(" ")[2].replace("tuple", "list")
    return f"{label} {expected}, found {value!r}; {remedy}."
