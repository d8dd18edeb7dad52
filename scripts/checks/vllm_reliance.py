"""Looks up in the vLLM of this environment everything that a package relies on.

    PYTHON scripts/checks/vllm_reliance.py OUT.json

scripts/checks/check_vllm.py runs this in the environment of each version of vLLM. It needs nothing
but that environment: it imports both packages and compares signatures.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
IMPORTED, CALLED, OVERRIDDEN, READ = "imported", "called", "overridden", "read"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Reliance:
    """Everything that a package relies on in a host package.

    Args:
        package: name of the package that relies on the host.
        attributes: names by class or module of the host, for what is read of its objects.
        host: name of the host.

    Attributes:
        problems: what does not fit, by kind, owner and name; empty text where it fits.
    """

    def __init__(self, package: str, attributes: dict[str, list[str]], host: str = "vllm") -> None:
        self.package, self.attributes, self.host = package, attributes, host
        self.problems: dict[tuple[str, str, str], str] = {}
        for owner, names in attributes.items():
            for name in names:
                problem = "" if has_attribute(self.find(owner), name) else "missing"
                self.add(READ, owner, name, problem)
        trees = {module: ast.parse(inspect.getsource(module)) for module in self.modules()}
        own = {getattr(node, "name", "") for tree in trees.values() for node in ast.walk(tree)}
        methods = self.listed_methods(own)
        for module, tree in trees.items():
            self.check_imports(tree)
            self.check_texts(tree)
            self.check_calls(tree, methods)
            for ours in vars(module).values():
                if inspect.isclass(ours) and ours.__module__ == module.__name__:
                    self.check_class(ours)

    def add(self, kind: str, owner: str, name: str, problem: str) -> None:
        """Records one name; of several uses the one that does not fit counts."""
        key = (kind, owner, name)
        self.problems[key] = self.problems.get(key) or problem

    def is_host(self, name: str) -> bool:
        """Whether a dotted name begins with the host's."""
        return name.split(".")[0] == self.host

    def find(self, path: str) -> Any:
        """The host's module or object of a dotted path; None where there is none."""
        try:
            return importlib.import_module(path)
        except ImportError:
            owner, _, name = path.rpartition(".")
            return getattr(self.find(owner), name, None) if owner else None

    def modules(self) -> Iterator[ModuleType]:
        """Imports the package's modules; one that cannot be imported is a problem."""
        root = importlib.import_module(self.package)
        names = [module.name for module in pkgutil.walk_packages(root.__path__, f"{self.package}.")]
        for name in names:
            try:
                yield importlib.import_module(name)
            except ImportError as error:
                self.add(IMPORTED, self.package, name, f"cannot be imported: {error}")

    def check_imports(self, tree: ast.Module) -> None:
        """Looks up imports; where `except ImportError` names another, one of them is enough."""
        instead: dict[tuple[int, str], list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and "ImportError" in ast.dump(node):
                bodies = [node.body, *(handler.body for handler in node.handlers)]
                imports = [s for body in bodies for s in body if isinstance(s, ast.ImportFrom)]
                for each in imports:
                    others = [f"{s.module}" for s in imports]
                    instead |= {(each.lineno, alias.name): others for alias in each.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and self.is_host(node.module or ""):
                for alias in node.names:
                    modules = instead.get((node.lineno, alias.name), [str(node.module)])
                    known = any(self.find(f"{m}.{alias.name}") is not None for m in modules)
                    self.add(IMPORTED, str(node.module), alias.name, "" if known else "missing")

    def check_texts(self, tree: ast.Module) -> None:
        """Looks up texts that name modules, and groups of entry points in the host's plugins."""
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(rf"{self.host}(\.[a-z_0-9]+)+", text):
                groups = self.find(f"{self.host}.plugins")
                known = self.find(text) is not None or text in inspect.getsource(groups)
                self.add(IMPORTED, text, "", "" if known else "missing")

    def listed_methods(self, own: set[str]) -> dict[str, list[tuple[str, Any]]]:
        """Methods among the attributes, by name, with their owners.

        Args:
            own: names of the package's own functions, whose calls are not told from the host's.
        """
        methods: dict[str, list[tuple[str, Any]]] = {}
        for owner, names in self.attributes.items():
            for name in set(names) - own:
                method = inspect.getattr_static(self.find(owner), name, None)
                if inspect.isclass(self.find(owner)) and is_routine(method):
                    methods.setdefault(name, []).append((owner, method))
        return methods

    def check_calls(self, tree: ast.Module, methods: dict[str, list[tuple[str, Any]]]) -> None:
        """Fits calls of imported functions and of the listed methods."""
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and self.is_host(node.module or "")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            path = ast.unparse(node.func)
            root, dot, rest = path.partition(".")
            target = self.find(imported.get(root, "") + dot + rest) if root in imported else None
            if target is not None and callable(target):
                owner, _, name = (imported[root] + dot + rest).rpartition(".")
                self.add(CALLED, owner, name, call_problem(node, target, bound=True))
            elif imported and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                candidates = methods[node.func.attr]
                problems = [call_problem(node, method, bound=False) for _, method in candidates]
                self.add(CALLED, candidates[0][0], node.func.attr, min(problems, key=len))

    def check_class(self, ours: type) -> None:
        """Compares members of a class of ours with those of the host that they replace."""
        hosts = [base for base in ours.__mro__ if self.is_host(base.__module__)]
        hosts = [h for h in hosts if not any(o is not h and issubclass(o, h) for o in hosts)]
        for part in ours.__mro__:
            if part.__module__.split(".")[0] != self.package:
                continue
            generated = dataclasses.is_dataclass(part) and "__init__" in vars(part)
            for name, member in vars(part).items():
                if re.match("__(?!init__)|_abc_impl", name) or (name == "__init__" and generated):
                    continue
                for host in hosts:
                    theirs = inspect.getattr_static(host, name, None)
                    if hasattr(host, name):
                        path = f"{host.__module__}.{host.__qualname__}"
                        self.add(OVERRIDDEN, path, name, override_problem(theirs, member))
            self.check_super_calls(ours, part)

    def check_super_calls(self, ours: type, part: type) -> None:
        """Fits calls of `super().method` that reach the host."""
        if not any(self.is_host(base.__module__) for base in ours.__mro__):
            return
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(part)))
        bases = ours.__mro__[ours.__mro__.index(part) + 1 :]
        for node in ast.walk(tree):
            function = node.func if isinstance(node, ast.Call) else None
            if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "super()":
                continue
            base = next((base for base in bases if function.attr in vars(base)), object)
            if self.is_host(base.__module__):
                method = getattr(base, function.attr)
                problem = call_problem(node, method, bound=inspect.ismethod(method))
                self.add(CALLED, f"{base.__module__}.{base.__qualname__}", function.attr, problem)
            elif base is object and function.attr != "__init__":
                self.add(CALLED, f"{bases[0].__module__}", function.attr, "missing")


def has_attribute(owner: Any, name: str) -> bool:
    """Whether a module has a name, or objects of a class have an attribute."""
    if owner is None or hasattr(owner, name) or inspect.ismodule(owner):
        return owner is not None and hasattr(owner, name)
    assigned = rf"\bself\.{name}\b[^=\n(]*(\n[^=\n(]*)?=(?!=)|register_\w+\(\s*\"{name}\""
    for base in inspect.getmro(owner):
        if name in getattr(base, "__annotations__", {}):
            return True
        if base.__module__ not in ("builtins", "abc") and hasattr(base, "__dict__"):
            try:
                source = inspect.getsource(base)
            except (OSError, TypeError):
                continue
            if re.search(assigned, source):
                return True
    return False


def is_routine(member: Any) -> bool:
    """Whether a class's member, as `getattr_static` gives it, is a method of any kind."""
    return inspect.isroutine(member) or isinstance(member, classmethod | staticmethod)


def signature_of(member: Any, bound: bool = False) -> inspect.Signature:
    """The signature that callers see, without `self` or `cls` unless it is `bound` already."""
    static = isinstance(member, staticmethod)
    signature = inspect.signature(getattr(member, "__func__", member) if not bound else member)
    if static or bound:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def override_problem(theirs: Any, ours: Any) -> str:
    """What callers of their member may do that ours does not take; empty if nothing."""
    computed = [isinstance(member, property) for member in (theirs, ours)]
    routine = [is_routine(member) for member in (theirs, ours)]
    if computed[0] != computed[1] or not all(routine):
        return "is a property on one side only" if any(computed) and any(routine) else ""
    their_signature, our_signature = signature_of(theirs), signature_of(ours)
    named = [p for p in their_signature.parameters.values() if p.kind not in VARIADIC]
    for given in (named, [p for p in named if p.default is p.empty]):
        positional = [p.name for p in given if p.kind is not p.KEYWORD_ONLY]
        keywords = {p.name: p.name for p in given if p.kind is p.KEYWORD_ONLY}
        try:
            bound = our_signature.bind(*positional, **keywords)
            our_signature.bind(**{p.name: p.name for p in given if p.kind is not p.POSITIONAL_ONLY})
        except TypeError as error:
            return f"is called as {their_signature}: {error}"
        if any(isinstance(v, str) and v != name for name, v in bound.arguments.items()):
            return f"has another order: {their_signature}"
    kinds = [
        {p.kind for p in each.parameters.values()} & {*VARIADIC}
        for each in (their_signature, our_signature)
    ]
    return "" if kinds[0] <= kinds[1] else f"takes any arguments: {their_signature}"


def call_problem(call: ast.Call, target: Any, bound: bool) -> str:
    """Why a call does not fit a function; empty where it does, starred arguments believed."""
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    keywords = {each.arg: None for each in call.keywords if each.arg is not None}
    try:
        signature = signature_of(target, bound or inspect.ismethod(target))
        if starred or any(each.arg is None for each in call.keywords):
            signature.bind_partial(**keywords)
        else:
            signature.bind(*call.args, **keywords)
    except TypeError as error:
        return f"called as {ast.unparse(call)[:80]}: {error}"
    except ValueError:  # a builtin that has no signature
        return ""
    return ""


def read_attributes(path: Path = HERE / "vllm_attributes.txt") -> dict[str, list[str]]:
    """Reads names by class or module of vLLM: its path, a colon and names over several lines."""
    lines = re.sub(r"\n +", " ", path.read_text()).splitlines()
    return {f"vllm.{line.split(':')[0]}": line.split(":")[1].split() for line in lines}


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    problems = Reliance("vllm_kvcompress", read_attributes()).problems
    Path(sys.argv[1]).write_text(json.dumps([[*key, problem] for key, problem in problems.items()]))
