"""Private names of vLLM are used in vllm_plugin/compat/ alone."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_kvcompress import vllm_plugin
from vllm_kvcompress.vllm_plugin.compat.layers import of_cached_values
from vllm_kvcompress.vllm_plugin.compat.scheduler import SchedulerHooks

FOLDER = Path(vllm_plugin.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
COMPAT = [path for path in FILES if path.parent == FOLDER / "compat"]
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages([str(FOLDER)], f"{vllm_plugin.__name__}.")
]
CLASSES = {
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__ == module.__name__
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_abc_"))


def is_own(value: ast.expr) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private_names(cls: type) -> set[str]:
    """Private names that a class defines, or reads or sets of itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    used = {node.attr for node in attributes if is_own(node.value)}
    return set(filter(is_private, used | set(vars(cls))))


def private_names_of_others(path: Path) -> Iterator[str]:
    """Private names that a file imports from vLLM, or reads of objects that are not `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            yield from (alias.name for alias in node.names if is_private(alias.name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_only_compat_reads_private_names_of_other_objects(path: Path) -> None:
    names = list(private_names_of_others(path))
    assert not names or path in COMPAT, names


def test_private_names_of_other_objects_are_recognized() -> None:
    assert any(list(private_names_of_others(path)) for path in COMPAT)


def test_only_compat_overrides_or_calls_private_methods_of_vllm() -> None:
    """Every class is looked at as a part of each of its subclasses, since mixins have no base."""
    for each in CLASSES:
        theirs = [base for base in each.__mro__ if base.__module__.startswith("vllm.")]
        inherited = set().union(*map(private_names, theirs))
        for part in each.__mro__:
            if part.__module__.startswith(vllm_plugin.__name__):
                used = private_names(part) & inherited
                assert not used or part is SchedulerHooks, (each, part, used)


def test_hooks_hide_no_public_name_of_vllm() -> None:
    hooks = {name for name in vars(SchedulerHooks) if not name.startswith("_")}
    assert hooks == {
        *("clip_chunk", "ends_at_states", "reusable_end"),
        *("find_prefix_hit", "preempt", "free_request"),
        *("end_load", "handle_invalid_blocks"),
    }
    assert not hooks & set(dir(AsyncScheduler))


def test_projections_of_latent_values_go_through_the_values_of_heads() -> None:
    """A cached row of an MLA layer has two latent elements, and a rotated key behind them."""
    up_values, outputs = torch.randn(3, 2, 4), torch.randn(3, 4, 5)  # by query head
    layer = SimpleNamespace(kv_lora_rank=2, head_size=6, W_UV=up_values)
    found = of_cached_values(layer, outputs)
    assert found.shape == (3, 6, 5)
    row = torch.randn(6)
    for head in range(3):
        value = [sum(float(row[i] * up_values[head, i, j]) for i in range(2)) for j in range(4)]
        for place in range(5):
            expected = sum(value[j] * float(outputs[head, j, place]) for j in range(4))
            assert float(row @ found[head, :, place]) == pytest.approx(expected, abs=1e-5)
    assert of_cached_values(SimpleNamespace(), outputs) is outputs
