"""Options stated once: a field of a model has an option's name, type, default, bounds and help.

Flags, keys of YAML and JSON, refusals and the tables in the docs follow from the fields.
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

MAX_TOKENS = 2**53  # in any setting: the largest number that JSON readers keep exact


def option(default: Any, help: str, metavar: str = "", **more: Any) -> Any:
    """A field of `Options`.

    Args:
        default: its value where none is given; `...` if one has to be.
        help: one sentence in Markdown, for `--help` and the docs.
        metavar: stands for the value in `--help`.
        more: `flag`, where the flag has another name than the field; `const`, the flag's value
            without one; `repeats`, the flag may be given several times; `example`, a value for
            refusals; all else goes to pydantic's `Field`.
    """
    flag = {key: more.pop(key, None) for key in ("flag", "const", "repeats", "example")}
    extra = {"metavar": metavar, **flag}
    return Field(default, description=help, json_schema_extra=extra, **more)


class Options(BaseModel):
    """Options that users give, frozen and checked.

    Attributes:
        name: what refusals call all of them together.
        flags: the beginning of each one's flag; empty: they have none.
        prefix: the beginning of each one's name, where that is longer than the field's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    flags: ClassVar[str] = ""
    prefix: ClassVar[str] = ""

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Options by their names, as YAML, JSON or flags give them; None is the default.

        Raises:
            ConfigError: an unknown or missing name, or a value that cannot work.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(" ".join(_refusals(cls, error))) from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form without defaults; `from_dict` of it gives equal options."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def __hash__(self) -> int:
        return hash(tuple(value for _, value in self if not isinstance(value, dict)))

    @model_validator(mode="before")
    @classmethod
    def _spell_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {str(key).replace("-", "_"): v for key, v in values.items() if v is not None}

    @classmethod
    def flag(cls, field: str) -> str:
        """The flag of a field, such as --kv-budget."""
        name = about(cls.model_fields[field])["flag"] or field
        return cls.flags + name.replace("_", "-")


def add_flags(
    parser: argparse._ActionsContainer,
    options: type[Options],
    dest: str,
    fields: Iterable[str] = (),
) -> None:
    """Adds the flags of some fields, or of all that are no sections of their own.

    Args:
        parser: or a group of one.
        options: whose fields.
        dest: of the namespace's dictionary that takes what is given, by the fields' names.
        fields: their names.
    """
    parser.set_defaults(**{dest: {}})
    for name in fields or options.model_fields:
        field = options.model_fields[name]
        shown, is_switch = about(field), bool in _types(field)
        if not shown["metavar"] and not is_switch:
            continue
        parser.add_argument(
            options.flag(name),
            action=_Give,
            dest=dest,
            default=argparse.SUPPRESS,
            field=(name, field),
            nargs=0 if is_switch else "?" if shown["const"] else None,
            const=True if is_switch else shown["const"],
            metavar=shown["metavar"] or None,
            help=plain(described(field)).replace("%", "%%"),
        )


class _Give(argparse.Action):
    """Puts a flag's value into the dictionary of what was given."""

    def __init__(self, field: tuple[str, FieldInfo], **about: Any) -> None:
        super().__init__(**about)
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
        elif about(self.field)["repeats"]:
            value = value.replace("\\n", "\n").replace("\\t", "\t")
            value = [*given.get(self.name, ()), value]
        elif types & {int, float}:
            value = parse_number(value)
        setattr(namespace, self.dest, given | {self.name: value})


def check_limits(flag: str, lowest: float | None, highest: float | None) -> None:
    """Refuses limits of what requests choose unless both are fractions, or none is given.

    Raises:
        ValueError: the reason; `flag` has braces in the place of min and max.
    """
    given = [limit for limit in (lowest, highest) if isinstance(limit, float)]
    if (lowest, highest) != (None, None) and (len(given) < 2 or given != sorted(given)):
        low, high = flag.format("min"), flag.format("max")
        raise ValueError(
            f"{low} {lowest}, {high} {highest}: expected both, as fractions in this order, such as "
            f"{low} 0.1 {high} 0.5."
        )


def check_choice(key: str, value: float, lowest: float | None, highest: float | None) -> None:
    """Refuses a number that the operator lets no request choose; without limits there is none.

    Raises:
        ConfigError: the reason, which names the key in `vllm_xargs`.
    """
    if lowest is None or highest is None:
        raise ConfigError(
            f"vllm_xargs {key} {value:g}: this server lets no request choose; leave it out."
        )
    if not lowest <= value <= highest:
        raise ConfigError(
            f"vllm_xargs {key} {value:g}: this server allows {lowest:g} to {highest:g}."
        )


def described(field: FieldInfo) -> str:
    """A field's help and default, in Markdown."""
    default = field.get_default(call_default_factory=True)
    is_said = field.is_required() or default in (None, False, (), {}) or not field.description
    return str(field.description) if is_said else f"{field.description} (default {default})"


def plain(markdown: str) -> str:
    """Text without the targets of its links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)


def parse_number(text: str) -> float | int | str:
    """An int or a float if the text is one, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def json_or_text(text: str) -> Any:
    """A JSON value, or the text where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def assignment(flag: str, text: str) -> tuple[str, Any]:
    """A name and a value from NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"{flag} {text}: expected NAME=VALUE; write for example {flag} a=0.5.")
    parsed = json_or_text(value)
    return name, parsed if isinstance(parsed, int | float | bool) else value


def about(field: FieldInfo) -> dict[str, Any]:
    """What `option` was told of a field's flag and example."""
    assert isinstance(field.json_schema_extra, dict), "a field that option() did not make"
    return field.json_schema_extra


def _types(field: FieldInfo) -> set[Any]:
    """The types of a field's values, containers without what they hold."""
    kinds = get_args(field.annotation)
    kinds = kinds if type(None) in kinds else (field.annotation,)
    return {getattr(kind, "__origin__", kind) for kind in kinds}


def _refusals(options: type[Options], error: ValidationError) -> Iterator[str]:
    """One sentence for every option that is wrong: what was expected, what came, what to do."""
    refused: set[Any] = set()
    for detail in error.errors(include_url=False):
        owner, path = options, list(map(str, detail["loc"]))
        while len(path) > 1 and (section := _section(owner, path[0])) is not None:
            owner, path = section, path[1:]
        if (owner, *path[:1]) not in refused:  # an option of several types is refused once
            refused.add((owner, *path[:1]))
            yield _refusal(owner, path, detail)


def _section(options: type[Options], name: str) -> type[Options] | None:
    types = _types(options.model_fields[name]) if name in options.model_fields else ()
    return next((t for t in types if isinstance(t, type) and issubclass(t, Options)), None)


def _refusal(options: type[Options], path: list[str], detail: Any) -> str:
    kind, reason, value = (
        detail["type"],
        detail["msg"].partition(" ")[2].replace("tuple", "list"),
        detail["input"],
    )
    if not path:
        if kind == "value_error":
            return str(detail["ctx"]["error"])
        return f"{options.name}: expected names with values, found {value!r}."
    name = options.prefix + path[0]
    if kind == "extra_forbidden":
        names = ", ".join(sorted(options.prefix + field for field in options.model_fields))
        return f"{options.name}: {name} is not known; valid are {names}."
    example = about(options.model_fields[path[0]])["example"]
    remedy = "leave it out for the default" if example is None else f"give for example {example}"
    label = f"{name} ({options.flag(path[0])})" if options.flags else f"{options.name} {name}"
    if kind == "value_error":
        return f"{label}: {detail['ctx']['error']}"
    if kind == "missing":
        return f"{options.name}: {label} is missing; {remedy}."
    return f"{label} {reason}, found {value!r}; {remedy}."
