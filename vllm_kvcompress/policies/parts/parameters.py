"""Parameters of policies: fields of their dataclasses, checked where users' values come in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.errors import ConfigError


def parameter(
    default: int | float | str,
    meaning: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Makes a dataclass field that users can set; see `Parameter`."""
    bounds = {"minimum": minimum, "maximum": maximum, "choices": choices}
    return field(default=default, metadata={"meaning": meaning, **bounds})


def switch(meaning: str, default: str = "off") -> Any:
    """Makes a parameter that is on or off."""
    return parameter(default, meaning, choices=("off", "on"))


@dataclass(frozen=True)
class Parameter:
    """Setting of a policy.

    Attributes:
        name: as users write it.
        default: its type is the parameter's type.
        meaning: a few words.
        minimum, maximum: bounds of a number, or None.
        choices: valid values of a text parameter, else empty.
    """

    name: str
    default: int | float | str
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: object) -> int | float | str:
        """Converts a value to the parameter's type.

        Raises:
            ConfigError: the value has another type, is out of bounds or not among the choices.
        """
        if isinstance(self.default, str):
            if value not in self.choices:
                raise ConfigError(
                    f"{self.name}: expected one of {', '.join(self.choices)}, found {value!r}."
                )
            return str(value)
        integral = isinstance(self.default, int)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or (integral and value != int(value)):  # type: ignore[arg-type,call-overload]
            kind = "a whole number" if integral else "a number"
            raise ConfigError(f"{self.name}: expected {kind}, found {value!r}.")
        number: float = float(value)  # type: ignore[arg-type]
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not low <= number <= high:
            raise ConfigError(
                f"{self.name}: expected at least {low:g} and at most {high:g}, found {value!r}."
            )
        return int(number) if integral else number


def check_parameters(
    policy: str, parameters: Sequence[Parameter], given: Mapping[str, object]
) -> dict[str, Any]:
    """Returns the value of every parameter: the given one, else the default.

    Raises:
        ConfigError: an unknown parameter, or a value that does not fit.
    """
    known = {parameter.name: parameter for parameter in parameters}
    if unknown := sorted(set(given) - set(known)):
        valid = f"valid are {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"{policy} has no parameter {', '.join(unknown)}; {valid}.")
    return {name: each.check(given.get(name, each.default)) for name, each in known.items()}
