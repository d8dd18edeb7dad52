"""Triton's interpreter without what changes nothing, half of the time that kernels take in it.

At every launch and every call of a function it looks through all names of its language for those
that it replaces; for every number that it makes it builds a table of types; and every operation of
integers is done again in int64, and compared, for an assertion that is off.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Has the interpreter of this process look up names and types once, and leave the rest out."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # asserts nothing
        builder.options = replace(builder.options, sanitize_overflow=False)
    make_type = interpreter._get_np_dtype
    type_of = cache(make_type)

    @cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        """Returns the names to replace and what they are; first called when nothing is replaced."""
        members = inspect.getmembers(package)
        return [(name, member) for name, member in members if tl.core.is_builtin(member)]

    def replace_builtins(package: Any, *rest: Any) -> None:
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, *rest)

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.scalar
        pointer = isinstance(scalar, tl.pointer_type)  # cannot be hashed
        return make_type(scalar) if pointer else type_of(scalar)

    interpreter._patch_builtin = replace_builtins
    interpreter._get_np_dtype = numpy_type
