"""What this package relies on in vLLM, found in its own sources, and whether a vLLM has it.

Imports, base classes, overridden methods and calls are found by themselves, and attributes
wherever the sources say of which class: by an annotation, or because `self` is a subclass. Of
objects that nobody annotates, `names.READ` says what they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_check.names import READ, REPLACING, TEXTS
from vllm_check.reader import READ_THERE, Function, Reader, is_vllm, place
from vllm_check.sources import Class, Module, Sources, decorators, nested

IMPORTED, OVERRIDDEN = "imported", "overridden"


@dataclass(frozen=True)
class Finding:
    """One thing that is relied on.

    Attributes:
        kind: imported, overridden, called or read.
        owner: dotted name of the module or class.
        name: of it.
        problem: how it does not fit; empty when it does.
        where: the first place that relies on it.
    """

    kind: str
    owner: str
    name: str
    problem: str = ""
    where: str = ""


@dataclass
class Reliance:
    """Everything that the package relies on, looked up in one vLLM.

    Args:
        package: folder of this package.
        vllm: sources of the vLLM to look in.
        read: attributes by class that our sources do not say.

    Attributes:
        untyped: where attributes of unknown objects are read, by name.
    """

    package: Path
    vllm: Sources
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    read: dict[str, tuple[str, ...]] = field(default_factory=lambda: READ)
    untyped: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ours = Sources(self.package.parent, self.package.name, also=self.vllm)
        paths = sorted(self.package.rglob("*.py"))
        names = [".".join(p.relative_to(self.package.parent).with_suffix("").parts) for p in paths]
        found = [self.ours.module(name.removesuffix(".__init__")) for name in names]
        self.modules = [module for module in found if module is not None]
        for module in self.modules:
            self._imports(module)
            self._texts(module)
        concrete = [each for each in self._classes() if self._stems_from_vllm(each)]
        for each in concrete:
            self._overrides(each)
            for part in self._own(each):
                for method in part.methods.values():
                    Reader(self, part.module, part, each).read(method)
        mixed_in = {part for each in concrete for part in self._own(each)}
        for module in self.modules:
            for node in module.tree.body:
                if isinstance(node, Function):
                    Reader(self, module).read(node)
        for each in self._classes():
            if each not in mixed_in:
                for method in each.methods.values():
                    Reader(self, each.module, each, each).read(method)
        self._table()

    def add(self, kind: str, owner: str, name: str, problem: str, where: str) -> None:
        """Records a thing; of several uses the one that does not fit counts."""
        key = (kind, owner, name)
        if key not in self.findings or (problem and not self.findings[key].problem):
            self.findings[key] = Finding(kind, owner, name, problem, where)

    def uncovered(self, elsewhere: set[str]) -> dict[str, str]:
        """Attributes that must be vLLM's, and of which `READ` does not say what they belong to.

        Args:
            elsewhere: names of attributes of Python's and torch's objects.

        Returns:
            The first place of each.
        """
        names = {name for names in self.read.values() for name in names} | elsewhere
        for module in self.modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.AnnAssign):
                    names.add(ast.unparse(node.target).removeprefix("self."))
                elif isinstance(node, ast.Assign):
                    names |= {ast.unparse(each).removeprefix("self.") for each in node.targets}
        near = [module for module in self.modules if self.touches_vllm(module)]
        files = tuple(place(module, module.tree).removesuffix("1") for module in near)
        found = {}
        for name, places in self.untyped.items():
            close = [each for each in places if each.startswith(files)]
            if close and name not in names:
                found[name] = close[0]
        return found

    def replacing(self) -> set[str]:
        """Members of our classes that stand in for vLLM's without asking these: no `super()`.

        Where vLLM's has gone, nobody calls ours, and nothing else tells.
        """
        names = set()
        for each in self._classes():
            bases = self.bases_of(each)
            for part in self._own(each) if bases else ():
                bodies = {name: ast.unparse(node) for name, node in part.methods.items()}
                bodies |= dict.fromkeys(class_attributes(part), "")
                for name, body in bodies.items():
                    replaced = any(base.find(name) for base in bases)
                    if replaced and f"super().{name}(" not in body:
                        names.add(name)
        return names

    def touches_vllm(self, module: Module) -> bool:
        """Whether a module of ours meets objects of vLLM's."""
        imports = (n for n in ast.walk(module.tree) if isinstance(n, ast.ImportFrom))
        plugin = f"{self.package.name}.vllm_plugin."
        return any(is_vllm(n.module or "") for n in imports) or module.name.startswith(plugin)

    def is_ours(self, module: Module) -> bool:
        """Whether a module belongs to this package."""
        return module.name.split(".")[0] == self.package.name

    def base_of(self, each: Class) -> Class | None:
        """vLLM's first class that a class of ours stems from, or is."""
        return next((a for a in each.ancestors if not self.is_ours(a.module)), None)

    def bases_of(self, each: Class) -> list[Class]:
        """vLLM's classes that a class of ours names as its bases, or those of ours do."""
        theirs = [a for a in each.ancestors if not self.is_ours(a.module)]
        return [a for a in theirs if not any(a in b.ancestors for b in theirs if b is not a)]

    def _stems_from_vllm(self, each: Class) -> bool:
        return self.base_of(each) is not None

    def _own(self, each: Class) -> list[Class]:
        return [a for a in each.ancestors if self.is_ours(a.module)]

    def _classes(self) -> Iterator[Class]:
        for module in self.modules:
            for node in nested(module.tree.body):
                if isinstance(node, ast.ClassDef):
                    yield self.ours.class_of(module, node)

    def _imports(self, module: Module) -> None:
        """Every import from vLLM; where one stands in for another, either will do."""
        instead: dict[ast.stmt, list[ast.stmt]] = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Try):
                handlers = [each.body for each in node.handlers if "Import" in ast.dump(each)]
                body = [each for each in node.body if isinstance(each, ast.ImportFrom)]
                others = [e for b in handlers for e in b if isinstance(e, ast.ImportFrom)]
                for each in body + others if others else ():
                    instead[each] = [e for e in body + others if e is not each]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and is_vllm(node.module or ""):
                for alias in node.names:
                    problem = self._imported(node, alias.name)
                    if problem and any(
                        not self._imported(other, alias.name) for other in instead.get(node, ())
                    ):
                        problem = ""
                    where = place(module, node)
                    self.add(IMPORTED, str(node.module), alias.name, problem, where)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if is_vllm(alias.name):
                        self._module_exists(alias.name, place(module, node))

    def _imported(self, node: ast.ImportFrom, name: str) -> str:
        found = self.vllm.module(node.module or "")
        if found is None:
            return "no such module"
        return "" if found.has(name) else "missing"

    def _module_exists(self, name: str, where: str) -> None:
        problem = "" if self.vllm.module(name) else "no such module"
        self.add(IMPORTED, name, "", problem, where)

    def _texts(self, module: Module) -> None:
        """Modules of vLLM that are named in strings, and the entry points."""
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if node.value in TEXTS:
                known = self.vllm.module(TEXTS[node.value])
                problem = "" if known and node.value in known.texts else "missing"
                owner = TEXTS[node.value]
                self.add(READ_THERE, owner, f'"{node.value}"', problem, place(module, node))
            elif re.fullmatch(r"vllm(\.[a-z_0-9]+)+", node.value):
                self._module_exists(node.value, place(module, node))

    def _overrides(self, each: Class) -> None:
        """Members of a class of ours that vLLM's bases have too, or should."""
        bases = self.bases_of(each)
        for part in self._own(each):
            for name in {*part.methods, *class_attributes(part)}:
                if name.startswith("__") and name != "__init__":
                    continue
                where = place(part.module, part.methods.get(name, part.node))
                holders = [(base, base.find(name)) for base in bases if base.find(name)]
                for base, holder in holders:
                    assert holder is not None
                    problem = self._differs(holder, part, name) if name in part.methods else ""
                    self.add(OVERRIDDEN, base.name, name, problem, where)
                if not holders and name in REPLACING - {"__init__"}:
                    self.add(OVERRIDDEN, bases[0].name, name, "missing", where)

    def _differs(self, parent: Class, part: Class, name: str) -> str:
        if name not in parent.methods:
            return "is no method there"
        theirs, ours = decorators(parent, name), decorators(part, name)
        for kind in ("property", "cached_property"):
            if (kind in ours) != (kind in theirs) and "property" in str((ours, theirs)):
                return "is a property on one side only"
        there, here = parent.signature(name), part.signature(name)
        assert there is not None
        assert here is not None
        return there.why_not_overridden(here)

    def _table(self) -> None:
        for path, names in self.read.items():
            found = self.vllm.class_named(path)
            for name in names:
                problem = "no such class" if found is None else ""
                if found is not None and found.find(name) is None:
                    problem = "missing"
                self.add(READ_THERE, path, name, problem, "")


def class_attributes(each: Class) -> set[str]:
    """Attributes that a class gives a value in its body."""
    found = set()
    for node in each.node.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
