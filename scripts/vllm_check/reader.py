"""Follows functions of ours through their annotations, to tell what they read and call in vLLM."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_check.names import NARROWED
from vllm_check.sources import Class, Defined, Module, Signature, decorators

if TYPE_CHECKING:
    from vllm_check.reliance import Reliance

CALLED, READ_THERE = "called", "read or set"


@dataclass(frozen=True)
class Instance:
    """An object of a class."""

    of: Class


@dataclass(frozen=True)
class Many:
    """A collection of objects of a class."""

    of: Class


@dataclass(frozen=True)
class Bound:
    """A method or function, as it is called."""

    owner: str
    name: str
    signature: Signature
    returns: Value = None


@dataclass(frozen=True)
class Super:
    """What `super()` gives in a method of `after`, for an object of `of`."""

    of: Class
    after: Class


Value = Instance | Many | Bound | Super | Class | Module | None
Function = ast.FunctionDef | ast.AsyncFunctionDef
COLLECTIONS = {"list", "List", "Sequence", "Iterable", "tuple", "deque", "set", "dict", "Mapping"}


class Reader:
    """Follows one function of ours, and notes what it reads and calls in vLLM.

    Args:
        reliance: takes what is found.
        module: that the function is in.
        part: the class that defines it, if any.
        whole: the class of `self`, which `part` may be mixed into.
    """

    def __init__(
        self,
        reliance: Reliance,
        module: Module,
        part: Class | None = None,
        whole: Class | None = None,
    ) -> None:
        self.reliance = reliance
        self.module = module
        self.part = part
        self.whole = whole
        self.local: dict[str, Value] = {}
        self.known: dict[ast.expr, Value] = {}

    def read(self, function: Function) -> None:
        """The function, and those within it."""
        given = function.args
        for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            self.local[each.arg] = self.annotated(each.annotation, self.module)
        if self.part is not None and self.whole is not None and given.args:
            kinds = decorators(self.part, function.name)
            if "staticmethod" not in kinds:
                own = self.whole if "classmethod" in kinds else Instance(self.whole)
                self.local[given.args[0].arg] = own
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom | ast.Import):
                self._import(node)
        for statement in function.body:
            self._follow(statement)

    def _import(self, node: ast.ImportFrom | ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.ImportFrom) and node.module:
                origin = self.reliance.ours.module(node.module)
                inner = self.reliance.ours.module(f"{node.module}.{alias.name}")
                found = inner or (origin and origin.get(alias.name))
                if found is not None or name not in self.local:
                    self.local[name] = self._as_value(found)

    def _as_value(self, found: Class | Module | Defined | None) -> Value:
        if isinstance(found, Class | Module):
            return found
        if found is not None and isinstance(found.node, Function):
            returns = self.annotated(found.node.returns, found.module)
            signature = Signature.of(found.node, False)
            return Bound(found.module.name, found.node.name, signature, returns)
        if found is not None and isinstance(found.node, ast.AnnAssign):
            return self.annotated(found.node.annotation, found.module)
        return None

    def _follow(self, node: ast.AST) -> None:
        """A statement, in the order of its parts, so that names are known when they are read."""
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self._assign(target, node.value, value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self.local[node.target.id] = self.annotated(node.annotation, self.module)
        elif isinstance(node, ast.For | ast.comprehension):
            many = self.value(node.iter)
            if isinstance(node.target, ast.Name):
                found = Instance(many.of) if isinstance(many, Many) else None
                self.local[node.target.id] = found
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for each in node.generators:
                self._follow(each)
        if isinstance(node, ast.Attribute | ast.Call):
            self.value(node)
        for child in ast.iter_child_nodes(node):
            self._follow(child)

    def _assign(self, target: ast.expr, node: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.local[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(node, ast.Tuple):
            for each, part in zip(target.elts, node.elts, strict=False):
                self._assign(each, part, self.value(part))
        elif isinstance(target, ast.Tuple):
            for each in target.elts:
                self._assign(each, node, None)

    def value(self, node: ast.expr) -> Value:
        """What an expression is, as far as it can be told."""
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            if node.id in self.local:
                return self.local[node.id]
            return self._as_value(self.module.get(node.id))
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            many = self.value(node.value)
            return Instance(many.of) if isinstance(many, Many) else None
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.value, node.values)), None)
        return None

    def _attribute(self, node: ast.Attribute) -> Value:
        owner, where = self.value(node.value), place(self.module, node)
        if isinstance(owner, Module):
            if not self.reliance.is_ours(owner):
                problem = "" if owner.has(node.attr) else "missing"
                self.reliance.add(READ_THERE, owner.name, node.attr, problem, where)
            return self._as_value(owner.get(node.attr))
        if isinstance(owner, Super):
            return self._inherited(owner, node, where)
        found = owner.of if isinstance(owner, Instance) else owner
        if not isinstance(found, Class):
            if owner is None:
                self.reliance.untyped.setdefault(node.attr, []).append(where)
            return None
        holder = found.find(node.attr)
        if holder is None and found.name in NARROWED:
            found = self.reliance.ours.class_named(NARROWED[found.name]) or found
            holder = found.find(node.attr)
        base = self.reliance.base_of(found)
        if base is not None and (holder is None or not self.reliance.is_ours(holder.module)):
            missing = holder is None and not found.has_foreign_base
            if not node.attr.startswith("__"):
                problem = "missing" if missing else ""
                self.reliance.add(READ_THERE, base.name, node.attr, problem, where)
        return self._member(holder, node.attr) if holder else None

    def _inherited(self, owner: Super, node: ast.Attribute, where: str) -> Value:
        ancestors = owner.of.ancestors
        behind = ancestors[ancestors.index(owner.after) + 1 :]
        holder = next((each for each in behind if node.attr in each.members), None)
        base = self.reliance.base_of(owner.of)
        if holder is None and base is not None and node.attr != "__init__":
            self.reliance.add(CALLED, base.name, node.attr, "missing", where)
        return self._member(holder, node.attr) if holder else None

    def _member(self, holder: Class, name: str) -> Value:
        if name not in holder.methods:
            return self.annotated(holder.annotations[name], holder.module)
        returns = self.annotated(holder.methods[name].returns, holder.module)
        kinds = decorators(holder, name)
        if kinds & {"property", "cached_property", "functools.cached_property"}:
            return returns
        signature = holder.signature(name)
        return None if signature is None else Bound(holder.name, name, signature, returns)

    def _call(self, node: ast.Call) -> Value:
        where = place(self.module, node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and self.part and self.whole:
            return Super(self.whole, self.part)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and self.value(node.args[0]) is None:
                self.reliance.untyped.setdefault(str(name.value), []).append(where)
            return None
        called = self.value(node.func)
        if isinstance(called, Class):
            if not self.reliance.is_ours(called.module):
                signature = called.signature("__init__")
                problem = signature.why_not_called(node) if signature else ""
                self.reliance.add(CALLED, called.name, "__init__", problem, where)
            return Instance(called)
        if isinstance(called, Bound):
            if is_vllm(called.owner):
                problem = called.signature.why_not_called(node)
                self.reliance.add(CALLED, called.owner, called.name, problem, where)
            return called.returns
        return None

    def annotated(self, node: ast.expr | None, module: Module) -> Value:
        """What an annotation, or the class that is called for a value, stands for."""
        if node is None:
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, module)
        if isinstance(node, ast.BinOp):
            none = isinstance(node.left, ast.Constant) and node.left.value is None
            return self.annotated(node.right if none else node.left, module)
        if isinstance(node, ast.Subscript):
            return self._generic(node, module)
        found = module.resolve(node) if isinstance(node, ast.Name | ast.Attribute) else None
        return Instance(found) if isinstance(found, Class) else None

    def _generic(self, node: ast.Subscript, module: Module) -> Value:
        kind = ast.unparse(node.value).split(".")[-1]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if kind in ("Optional", "ClassVar", "Final", "Annotated"):
            return self.annotated(parts[0], module)
        if kind == "type":
            found = self.annotated(parts[0], module)
            return found.of if isinstance(found, Instance) else None
        if kind in COLLECTIONS:
            index = 1 if kind in ("dict", "Mapping") and len(parts) > 1 else 0
            found = self.annotated(parts[index], module)
            return Many(found.of) if isinstance(found, Instance) else None
        return self.annotated(node.value, module)


def is_vllm(name: str) -> bool:
    """Whether a dotted name lies in vLLM."""
    return name.split(".")[0] == "vllm"


def place(module: Module, node: ast.AST) -> str:
    """Where something stands, for people."""
    return f"{'/'.join(module.name.split('.')[1:])}.py:{getattr(node, 'lineno', 1)}"
