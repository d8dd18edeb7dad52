"""Reads a vLLM's Python sources without importing them: modules, classes, members, signatures."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

# Bases from elsewhere that bring no attribute that is asked for, or whose attributes are known.
PLAIN_BASES = {"object", "ABC", "Generic", "Protocol", "Enum", "str", "NamedTuple", "Exception"}


@dataclass(frozen=True)
class Signature:
    """What a function takes, without `self`.

    Attributes:
        positional: names that may be given by position.
        optional: names, by position or keyword, that may be left out.
        keyword: names that must be given by name.
        varargs, varkw: whether it takes more.
    """

    positional: tuple[str, ...]
    optional: frozenset[str]
    keyword: tuple[str, ...] = ()
    varargs: bool = False
    varkw: bool = False

    @classmethod
    def of(cls, node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> Signature:
        """Of a definition; `bound`: its first parameter is given by Python."""
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args)]
        optional = set(names[len(names) - len(given.defaults) :])
        kinds = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        optional |= {each.arg for each, default in kinds if default is not None}
        return cls(
            tuple(names[1:] if bound else names),
            frozenset(optional),
            tuple(each.arg for each in given.kwonlyargs),
            given.vararg is not None,
            given.kwarg is not None,
        )

    def why_not_called(self, call: ast.Call) -> str:
        """What of a call does not fit; empty when it does. Starred arguments are believed."""
        names = {each.arg for each in call.keywords if each.arg is not None}
        unknown = sorted(names - {*self.positional, *self.keyword})
        if unknown and not self.varkw:
            return f"takes no {', '.join(unknown)}"
        if any(isinstance(each, ast.Starred) for each in call.args):
            return ""
        if len(call.args) > len(self.positional) and not self.varargs:
            return f"takes {len(self.positional)} by position, not {len(call.args)}"
        if any(each.arg is None for each in call.keywords):
            return ""
        needed = {*self.positional[len(call.args) :], *self.keyword} - self.optional - names
        return f"needs {', '.join(sorted(needed))}" if needed else ""

    def why_not_overridden(self, ours: Signature) -> str:
        """What callers of this one may do that `ours` does not take; empty when it fits."""
        for index, name in enumerate(self.positional):
            if index < len(ours.positional):
                if ours.positional[index] != name:
                    return f"has {name} where ours has {ours.positional[index]}"
                if name in self.optional and name not in ours.optional:
                    return f"has {name} optional, ours does not"
            elif not (ours.varargs and (ours.varkw or name in ours.keyword)):
                return f"takes {name} too"
        for name in self.keyword:
            if not (ours.varkw or name in (*ours.keyword, *ours.positional)):
                return f"takes {name} too"
        more = {*ours.positional[len(self.positional) :], *ours.keyword}
        needed = more - ours.optional - {*self.keyword}
        if needed:
            return f"has no {', '.join(sorted(needed))}, which ours needs"
        if (self.varargs and not ours.varargs) or (self.varkw and not ours.varkw):
            return "takes any arguments, ours does not"
        return ""


@dataclass(eq=False)
class Class:
    """A class of the sources.

    Attributes:
        methods: by name.
        annotations: of attributes, with the module that they are written in; None: unknown.
    """

    module: Module
    node: ast.ClassDef
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    annotations: dict[str, ast.expr | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in nested(self.node.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.methods.setdefault(node.name, node)
                self._assigned_in(node)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.annotations[node.target.id] = node.annotation
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in names_in(target):
                        self.annotations.setdefault(name, None)

    def _assigned_in(self, method: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Attributes that a method gives to `self`."""
        given = {each.arg: each.annotation for each in (*method.args.args, *method.args.kwonlyargs)}
        for node in ast.walk(method):
            if isinstance(node, ast.AnnAssign):
                targets, value, annotation = [node.target], node.value, node.annotation
            elif isinstance(node, ast.Assign):
                targets, value, annotation = node.targets, node.value, None
            elif isinstance(node, ast.Call) and buffer_name(node):
                self.annotations.setdefault(buffer_name(node), None)
                continue
            else:
                continue
            if isinstance(value, ast.Name):
                annotation = annotation or given.get(value.id)
            if isinstance(value, ast.Call) and annotation is None:
                annotation = value.func  # if it is a class
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if is_of_self(part) and self.annotations.get(part.attr) is None:
                        whole = not isinstance(target, ast.Tuple)
                        self.annotations[part.attr] = annotation if whole else None

    @property
    def name(self) -> str:
        """With its module."""
        return f"{self.module.name}.{self.node.name}"

    @property
    def members(self) -> set[str]:
        """Its own methods and attributes."""
        return {*self.methods, *self.annotations}

    @cached_property
    def ancestors(self) -> list[Class]:
        """It and its bases in these sources, nearest first."""
        found = [self]
        for base in self.node.bases:
            resolved = self.module.resolve(base)
            if isinstance(resolved, Class):
                found += [each for each in resolved.ancestors if each not in found]
        return found

    @property
    def has_foreign_base(self) -> bool:
        """Whether attributes may come from a class outside of these sources."""
        return any(
            not isinstance(each.module.resolve(base), Class)
            and ast.unparse(base).split("[")[0].split(".")[-1] not in PLAIN_BASES
            for each in self.ancestors
            for base in each.node.bases
        )

    def find(self, name: str) -> Class | None:
        """The nearest class that has a member."""
        return next((each for each in self.ancestors if name in each.members), None)

    def signature(self, name: str) -> Signature | None:
        """Of a method, as callers of instances see it; of a dataclass's `__init__`, its fields."""
        if name == "__init__" and not any("__init__" in each.methods for each in self.ancestors):
            kinds = "".join(ast.unparse(each) for each in self.node.decorator_list)
            return self._fields() if "dataclass" in kinds else None
        owner = self.find(name)
        if owner is None or name not in owner.methods:
            return None
        return Signature.of(owner.methods[name], "staticmethod" not in decorators(owner, name))

    def _fields(self) -> Signature:
        names: dict[str, bool] = {}
        for each in reversed(self.ancestors):
            for node in each.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names[node.target.id] = node.value is not None
        optional = frozenset(name for name, default in names.items() if default)
        return Signature(tuple(names), optional)


@dataclass(frozen=True)
class Defined:
    """A function or annotated name, and where it stands."""

    module: Module
    node: ast.AST


@dataclass(eq=False)
class Module:
    """A module of the sources."""

    sources: Sources
    name: str
    path: Path | zipfile.Path

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """What is defined or imported at its top, by name; of several definitions the first."""
        found: dict[str, ast.AST] = {}
        for node in nested(self.tree.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name.split(".")[0], node)
            elif isinstance(node, ast.AnnAssign):
                found.setdefault(ast.unparse(node.target), node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in names_in(target):
                        found.setdefault(name, node)
        return found

    @cached_property
    def texts(self) -> set[str]:
        """Its string constants: names that its `__getattr__` may know are among them."""
        return {
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }

    def has(self, name: str) -> bool:
        """Whether `from module import name` works."""
        return (
            name in self.names
            or self.sources.module(f"{self.name}.{name}") is not None
            or ("__getattr__" in self.names and name in self.texts)
        )

    def get(self, name: str) -> Class | Module | Defined | None:
        """What a name of this module stands for, imports followed; None: unknown."""
        node = self.names.get(name)
        if isinstance(node, ast.ClassDef):
            return self.sources.class_of(self, node)
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            origin = self.sources.module(self._origin(node))
            if origin is None or (origin is self and alias.name == name):
                return None
            return self.sources.module(f"{origin.name}.{alias.name}") or origin.get(alias.name)
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            return self.sources.module(alias.name if alias.asname else name)
        if node is None and "__getattr__" in self.names:
            # A table of lazy imports, such as {"LLM": ".entrypoints.llm:LLM"}.
            for text in self.texts:
                path, colon, member = text.partition(":")
                if colon and member == name and path.startswith("."):
                    origin = self.sources.module(self.name + path)
                    return origin and origin.get(name)
        return None if node is None else Defined(self, node)

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        if self.path.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def resolve(self, node: ast.expr) -> Class | Module | Defined | None:
        """What an expression of names and dots stands for."""
        if isinstance(node, ast.Subscript):
            return self.resolve(node.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.resolve(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Name):
            return self.get(node.id)
        if isinstance(node, ast.Attribute):
            value = self.resolve(node.value)
            return value.get(node.attr) if isinstance(value, Module) else None
        return None


class Sources:
    """A tree of sources: an unpacked wheel, an installed package, or this project's own.

    Args:
        root: folder in which the package lies, or the inside of a wheel.
        package: its name.
        also: sources of another package that it imports from.
    """

    def __init__(
        self, root: Path | zipfile.Path, package: str = "vllm", also: Sources | None = None
    ) -> None:
        self.root = root
        self.package = package
        self.also = also
        self._classes: dict[ast.ClassDef, Class] = {}
        self.module = cache(self._module)

    def _module(self, name: str) -> Module | None:
        if name.split(".")[0] != self.package:
            return self.also.module(name) if self.also else None
        *parents, last = name.split(".")
        for parts in ([*parents, f"{last}.py"], [*parents, last, "__init__.py"]):
            path = self.root.joinpath(*parts)
            if path.is_file():
                return Module(self, name, path)
        return None

    def class_of(self, module: Module, node: ast.ClassDef) -> Class:
        """The class that is defined there."""
        if node not in self._classes:
            self._classes[node] = Class(module, node)
        return self._classes[node]

    def class_named(self, path: str) -> Class | None:
        """The class of a dotted path."""
        module, _, name = path.rpartition(".")
        found = self.module(module)
        member = found.get(name) if found else None
        return member if isinstance(member, Class) else None


def nested(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from nested(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from nested(handler.body)


def names_in(target: ast.expr) -> list[str]:
    """Plain names that an assignment gives values to."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for each in target.elts for name in names_in(each)]
    return [target.id] if isinstance(target, ast.Name) else []


def is_of_self(node: ast.expr) -> bool:
    """Whether an expression is an attribute of `self`."""
    value = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(value, ast.Name) and value.id == "self"


def buffer_name(call: ast.Call) -> str:
    """What `self.register_buffer` and its like name, if this is such a call."""
    known = ("register_buffer", "register_parameter")
    if isinstance(call.func, ast.Attribute) and call.func.attr in known and call.args:
        first = call.args[0]
        return first.value if isinstance(first, ast.Constant) else ""
    return ""


def decorators(owner: Class, name: str) -> set[str]:
    """Of a method, without what they are called with."""
    return {ast.unparse(each).split("(")[0] for each in owner.methods[name].decorator_list}
