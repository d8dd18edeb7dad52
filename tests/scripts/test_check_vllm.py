"""scripts/checks/check_vllm.py looks up all that is relied on, and reports differences."""

from __future__ import annotations

import ast
import builtins
import importlib
import logging
import multiprocessing
import re
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI

import check_vllm
import vllm_reliance
from vllm_kvcompress.scheduling.rule import PolicyDemand

PACKAGE = check_vllm.ROOT / "vllm_kvcompress"

# Attributes of models' modules and configurations, which need not be there.
MODELS = {"o_proj", "rotary_emb", "num_kv_shared_layers", "per_layer_config"}
MODELS |= {"attn_logit_softcapping", "index_topk", "layer_types"}
MODELS |= {"W_UK_T", "W_UV"}  # weights of vLLM's MLA layers, once they are loaded
# Of vLLM's command line, and of argparse's objects.
OPTIONS = {"model_tag", "headless", "api_key", "served_model_name"}
OPTIONS |= {"api_server_count", "data_parallel_size", "grpc"}
OPTIONS |= {"_actions", "option_strings", "dest", "nargs", "const"}
OWN = {"kvcompress_status", "kvcompress_sampling"}  # what we keep in the server's state
# Python's and torch's objects that no import of ours names, and any dataclass.
OBJECTS = (
    *(*vars(builtins).values(), multiprocessing.get_context("spawn"), Connection),
    *(torch.cpu, torch.accelerator, torch.nn.Module, logging.Logger, PolicyDemand),
    *(torch.distributed, torch.distributed.ReduceOp, FastAPI()),
)


@pytest.fixture(scope="module")
def looked_up() -> check_vllm.Problems:
    return check_vllm.look_up(Path(sys.executable))


def test_installed_vllm_has_all_that_is_relied_on(looked_up: check_vllm.Problems) -> None:
    assert {key: problem for key, problem in looked_up.items() if problem} == {}
    assert {kind for kind, _, _ in looked_up} == {"imported", "overridden", "called", "read"}


def test_every_import_is_looked_up(looked_up: check_vllm.Problems) -> None:
    """Imports are searched as text, which shares no code with the script."""
    written = set()
    for path in PACKAGE.rglob("*.py"):
        text = re.sub(r"#.*", "", path.read_text())
        for module, listed, single in re.findall(
            r"^ *from (vllm(?:\.\w+)*) import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE
        ):
            for name in re.split(r"[,\s]+", re.sub(r" as \w+", "", listed or single).strip(", \n")):
                written.add((module, name))
    assert len(written) > 40
    assert written - {(owner, name) for kind, owner, name in looked_up} == set()


def sources_that_touch_vllm() -> Iterator[ast.Module]:
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"^ *from vllm\b", path.read_text(), re.MULTILINE) or (
            "vllm_plugin" in path.parts
        ):
            yield ast.parse(path.read_text())


def own_names() -> set[str]:
    """Returns the names of functions, classes and variables of the package."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = [n for each in targets for n in ast.walk(each) if hasattr(n, "ctx")]
                stored = [n for n in parts if isinstance(n.ctx, ast.Store)]
                names |= {ast.unparse(each).removeprefix("self.") for each in stored}
    return names


def names_elsewhere() -> set[str]:
    """Returns attributes of other imported modules and of their classes."""
    objects: list[Any] = list(OBJECTS)
    for tree in sources_that_touch_vllm():
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for name in modules:
                if name.split(".")[0] not in ("vllm", PACKAGE.name):
                    module = importlib.import_module(name)
                    members = list(vars(module).values())
                    objects += [module, *(each for each in members if isinstance(each, type))]
    listed = MODELS | OPTIONS | OWN
    return listed | {name for each in objects for name in dir(each)}


def test_every_attribute_of_vllms_objects_is_looked_up(looked_up: check_vllm.Problems) -> None:
    used = {}
    for tree in sources_that_touch_vllm():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used[node.attr] = ast.unparse(node)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                name = node.args[1]
                used |= {name.value: ast.unparse(node)} if isinstance(name, ast.Constant) else {}
    known = own_names() | names_elsewhere() | {name for _, _, name in looked_up}
    known |= {part for _, owner, _ in looked_up for part in owner.split(".")}
    unknown = {name: where for name, where in used.items() if name not in known}
    assert unknown == {}, "say in scripts/checks/vllm_attributes.txt what class or module has it"


def test_docs_list_what_is_overridden(looked_up: check_vllm.Problems) -> None:
    page = check_vllm.PAGE.read_text().partition("Overridden:")[2]
    listed = {
        (owner, name)
        for owner, names in re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", names)
    }
    overridden = {
        (owner.removeprefix("vllm."), name)
        for kind, owner, name in looked_up
        if kind == "overridden"
    }
    assert overridden == listed, "write it anew: scripts/checks/check_vllm.py --markdown"


OURS = """
from host.engine import Engine, helper
try:
    from host.new_place import moved
except ImportError:
    from host.engine import moved

GROUP = "host.engine"

class Mixin:
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)

class OurEngine(Mixin, Engine):
    def schedule(self, request, limit=None):
        self.queue.push(request)
        return super().schedule(request, limit)

    def close(self):
        helper(1, flag=True)
"""
ENGINE = """
def helper(number, flag=False): ...
def moved(): ...

class Queue:
    def __init__(self):
        self.first, self.last = None, None

    def push(self, item): ...

class Base:
    def step(self): ...

class Engine(Base):
    def __init__(self):
        self.queue = Queue()

    def schedule(self, request, limit=None): ...

    def close(self): ...
"""
ATTRIBUTES = {"host.engine.Engine": ["queue"], "host.engine.Queue": ["first", "last", "push"]}


@pytest.fixture
def look_up_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Looks up what a hand-made package relies on in a hand-made host."""
    monkeypatch.syspath_prepend(tmp_path)

    def look_up(engine: str) -> dict[tuple[str, str, str], str]:
        for path, text in (("host", ""), ("host/plugins", ""), ("host/engine", engine)):
            file = tmp_path / (f"{path}/__init__.py" if path == "host" else f"{path}.py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        (tmp_path / "ours").mkdir(exist_ok=True)
        (tmp_path / "ours/__init__.py").write_text("")
        (tmp_path / "ours/engine.py").write_text(OURS)
        importlib.invalidate_caches()
        return vllm_reliance.Reliance("ours", ATTRIBUTES, host="host").problems

    yield look_up
    for name in [name for name in sys.modules if name.split(".")[0] in ("host", "ours")]:
        del sys.modules[name]


def test_host_with_all_names_has_no_problems(look_up_in: Any) -> None:
    problems = look_up_in(ENGINE)
    assert {key: problem for key, problem in problems.items() if problem} == {}
    assert ("overridden", "host.engine.Engine", "step") in problems
    assert ("called", "host.engine.Queue", "push") in problems


@pytest.mark.parametrize(
    ("old", "new", "name", "problem"),
    [
        ("def helper(", "def other(", "ours.engine", "cannot be imported"),
        ("def moved(", "def gone(", "ours.engine", "cannot be imported"),
        ("limit=None): ...", "limit=None, deadline=None): ...", "schedule", "too many positional"),
        ("request, limit=None)", "limit, request=None)", "schedule", "another order"),
        ("request, limit=None)", "request, *, limit=None)", "schedule", "too many positional"),
        ("limit=None): ...", "bound=None): ...", "schedule", "unexpected keyword argument 'bound'"),
        ("(self, request, limit=None)", "(self)", "schedule", "missing a required argument"),
        ("def step(self)", "def advance(self)", "step", "missing"),
        ("flag=False", "flags=False", "helper", "unexpected keyword argument 'flag'"),
        ("self.queue =", "self.line =", "queue", "missing"),
        ("self.first, self.last =", "self.head, self.last =", "first", "missing"),
        ("def push(self, item)", "def push(self)", "push", "too many positional"),
        ("    def close", "    @property\n    def close", "close", "a property on one side only"),
    ],
)
def test_a_planted_difference_is_reported(
    look_up_in: Any, old: str, new: str, name: str, problem: str
) -> None:
    assert old in ENGINE
    looked_up_names = look_up_in(ENGINE.replace(old, new))
    problems = [text for (_, _, named), text in looked_up_names.items() if named == name and text]
    assert any(problem in text for text in problems), looked_up_names


def test_a_member_that_vllm_no_longer_calls_is_reported(
    look_up_in: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a member overrides nothing, so it is found by comparing two versions."""
    reference = {("overridden", "host.engine.Engine", "close"): ""}
    looked_up_names = look_up_in(ENGINE.replace("def close(self)", "def shut(self)"))
    assert not any(looked_up_names.values())
    assert check_vllm.report("host 2", check_vllm.with_missing(looked_up_names, reference)) == 1
    assert "host.engine.Engine close: missing" in capsys.readouterr().out
