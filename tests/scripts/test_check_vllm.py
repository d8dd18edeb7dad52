"""That scripts/check_vllm.py knows all that is relied on in vLLM, and sees what is not there."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import logging
import multiprocessing
import re
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI

import check_vllm
from vllm_check import names
from vllm_check.reliance import Reliance
from vllm_check.sources import Sources
from vllm_kvcompress.vllm_plugin.spec import PolicyDemand

ROOT = Path(__file__).parents[2]

# Attributes of models' modules and configurations, which need not be there.
MODELS = {"o_proj", "rotary_emb", "num_kv_shared_layers", "attn_logit_softcapping"}
# Of vLLM's command line, and of argparse's objects.
OPTIONS = {"model_tag", "headless", "api_key", "served_model_name"}
OPTIONS |= {"api_server_count", "data_parallel_size", "grpc"}
OPTIONS |= {"_actions", "option_strings", "dest", "nargs", "const"}
OWN = {"kvcompress_status"}  # what we keep in the server's state
# Python's and torch's objects that no import of ours names, and any dataclass.
OBJECTS = (
    *(*vars(builtins).values(), multiprocessing.get_context("spawn"), Connection),
    *(torch.cpu, torch.accelerator, torch.nn.Module, logging.Logger, PolicyDemand),
    *(torch.distributed, torch.distributed.ReduceOp, FastAPI()),
)


def names_elsewhere(reliance: Reliance) -> set[str]:
    """Attributes of what sources that touch vLLM import from elsewhere, and of its classes."""
    objects: list[Any] = list(OBJECTS)
    for source in filter(reliance.touches_vllm, reliance.modules):
        for node in ast.walk(source.tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for name in modules:
                if name.split(".")[0] not in ("vllm", check_vllm.PACKAGE.name):
                    module = importlib.import_module(name)
                    members = list(vars(module).values())
                    objects += [module, *(each for each in members if isinstance(each, type))]
    return {name for each in objects for name in dir(each)} | MODELS | OPTIONS | OWN


@pytest.fixture(scope="module")
def installed() -> Reliance:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Reliance(check_vllm.PACKAGE, Sources(Path(spec.origin).parents[1]))


def test_the_installed_vllm_fits(installed: Reliance) -> None:
    found = installed.findings.values()
    assert [each for each in found if each.problem] == []
    assert {each.kind for each in found} == {"imported", "overridden", "called", "read or set"}


def test_every_import_is_looked_up(installed: Reliance) -> None:
    """Found by their looks, which shares nothing with the script's reading of syntax."""
    written = set()
    for path in check_vllm.PACKAGE.rglob("*.py"):
        text = re.sub(r"#.*", "", path.read_text())
        for module, listed, single in re.findall(
            r"^ *from (vllm(?:\.\w+)*) import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE
        ):
            for name in re.split(r"[,\s]+", re.sub(r" as \w+", "", listed or single).strip(", \n")):
                written.add((module, name))
    looked_up = {(f.owner, f.name) for f in installed.findings.values() if f.kind == "imported"}
    assert len(written) > 40
    assert written - looked_up == set()


def test_every_attribute_of_vllms_objects_is_looked_up(installed: Reliance) -> None:
    """What compat.py and others read of unannotated objects stands in the table of names."""
    found = installed.uncovered(names_elsewhere(installed))
    assert found == {}, "say in scripts/vllm_check/names.py what has it"


def test_members_that_replace_vllms_are_known(installed: Reliance) -> None:
    assert installed.replacing() == names.REPLACING, "change REPLACING in the same way"


def test_the_page_in_docs_names_all_that_is_looked_up(installed: Reliance) -> None:
    page = (ROOT / "docs" / "vllm-versions.md").read_text()
    listed: dict[tuple[str, str], set[str]] = {}
    for part in page.split("\n### ")[1:]:
        kind = part.splitlines()[0].lower()
        for owner, names_there in re.findall(r"^\| `([^`]+)` \| (.*?) \|", part, re.MULTILINE):
            listed[kind, owner] = set(re.findall(r"`([^`]+)`", names_there))
    missing = [
        found
        for found in installed.findings.values()
        if found.name
        and found.name not in listed.get((found.kind, found.owner.removeprefix("vllm.")), set())
    ]
    assert missing == [], "write it anew: scripts/check_vllm.py --markdown"


OURS = """
from vllm.engine import Engine, helper

class Mixin:
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)

class OurEngine(Mixin, Engine):
    def schedule(self, request, limit=None):
        self.queue.push(request)
        return super().schedule(request, limit)

    def close(self):
        helper(1, flag=True)

def peek(engine: Engine):
    return engine.queue.first, getattr(engine, "queue")
"""
QUEUE = """
class Queue:
    def __init__(self):
        self.first = None

    def push(self, item): ...
"""
ENGINE = """
from vllm.queue import Queue

def helper(number, flag=False): ...

class Base:
    def step(self): ...

class Engine(Base):
    def __init__(self):
        self.queue = Queue()

    def schedule(self, request, limit=None): ...

    def close(self): ...
"""


def fake(tmp_path: Path, engine: str = ENGINE, queue: str = QUEUE) -> dict[str, str]:
    """What is wrong with a hand-made wheel for a hand-made package, by name."""
    package = tmp_path / "ours"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(OURS)
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/engine.py", engine)
        archive.writestr("vllm/queue.py", queue)
    reliance = Reliance(package, Sources(zipfile.Path(wheel)), read={})
    return {f"{f.kind} {f.name}": f.problem for f in reliance.findings.values() if f.problem}


def test_a_wheel_that_has_everything_fits(tmp_path: Path) -> None:
    assert fake(tmp_path) == {}


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ("def helper(", "def other(", {"imported helper": "missing"}),
        ("class Engine", "class Motor", {"imported Engine": "missing"}),
        (
            "limit=None): ...",
            "limit=None, deadline=None): ...",
            {"overridden schedule": "takes deadline too"},
        ),
        (
            "request, limit=None): ...",
            "request, *, limit=None): ...",
            {"called schedule": "takes 1 by position, not 2"},
        ),
        ("limit=None): ...", "bound=None): ...", {"overridden schedule": "has bound where ours"}),
        ("def step(self)", "def advance(self)", {"called step": "missing"}),
        ("flag=False", "flags=False", {"called helper": "takes no flag"}),
        ("self.queue =", "self.line =", {"read or set queue": "missing"}),
        ("self.first =", "self.head =", {"read or set first": "missing"}),
        ("def push(self, item)", "def push(self)", {"called push": "takes 0 by position, not 1"}),
    ],
)
def test_a_planted_difference_is_reported(
    tmp_path: Path, old: str, new: str, problems: dict[str, str]
) -> None:
    assert old in ENGINE + QUEUE
    found = fake(tmp_path, ENGINE.replace(old, new), QUEUE.replace(old, new))
    for name, problem in problems.items():
        assert found.get(name, "").startswith(problem), found


def test_a_member_that_vllm_no_longer_calls_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_check.reliance.REPLACING", {"close"})
    found = fake(tmp_path, ENGINE.replace("def close(self)", "def shut(self)"))
    assert found == {"overridden close": "missing"}


def test_the_report_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    finding: Any = check_vllm.Finding("imported", "vllm.a", "b", "missing", "c.py:1")
    assert check_vllm.report("vllm-9.whl", [finding]) == 1
    assert "vllm.a.b: missing (c.py:1)" in capsys.readouterr().out
    page = check_vllm.page({("vllm", "9.0"): [finding], ("vllm", "8.0"): []})
    assert "| `a` | `b` | `b` missing | - |" in page
