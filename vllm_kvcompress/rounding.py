"""Integer division that rounds up."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def ceil_div(numerator: T, denominator: Any) -> T:
    """Returns numerator / denominator rounded up, of integers or of arrays and tensors of them."""
    negated: Any = -numerator  # type: ignore[operator]
    rounded: T = -(negated // denominator)
    return rounded
