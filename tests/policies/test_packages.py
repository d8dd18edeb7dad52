"""Policies in other packages: found, run, and refused if broken."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import foreign_policy
from tests.policies import oracles
from tests.policies.cases import Shape, make_view, rows_of
from vllm_kvcompress import policies
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import Policy, describe, registry, resolve

ROOT = Path(__file__).parents[2]
Install = Callable[[str, str], None]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_policy.install(tmp_path_factory.mktemp("package"))


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    """Clears the registry's cache, before and after the test."""
    registry._known.cache_clear()
    yield
    registry._known.cache_clear()


@pytest.fixture
def fading(installed: Path, fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed)


@pytest.fixture
def package(tmp_path: Path, fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package `other` whose module `other_policy` has this code, by hand."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_policy", raising=False)

    def install(code: str, value: str) -> None:
        (tmp_path / "other_policy.py").write_text(code)
        about = tmp_path / "other-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[vllm_kvcompress.policies]\nmine = {value}\n")

    return install


def command(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(installed), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "vllm_kvcompress.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands_list_a_foreign_policy_and_set_its_parameters(installed: Path) -> None:
    listed = json.loads(command(installed, "policies", "--json").stdout)
    names = [part["name"] for part in listed if part["kind"] == "policy"]
    assert names[-1] == "fading"
    assert names[:-1] == [name for name in registry.policies() if name != "fading"]
    explained = command(installed, "policies", "explain", "fading+momentfix").stdout
    assert "score     fading     norm of the value, halved every half_life tokens" in explained
    described = r"half_life +1024\.0 +tokens after which a norm counts half \(at least 1\)"
    assert re.search(described, explained)
    serve = ("serve", "m", "--kv-policy", "fading", "--kv-param")
    refused = command(installed, *serve, "half_life=0.5")
    assert refused.returncode == 2
    assert "half_life: expected at least 1 and at most inf, found 0.5" in refused.stderr


@pytest.mark.usefixtures("fading")
@pytest.mark.parametrize("total", [2, 5, 9])
@pytest.mark.parametrize("shape", [Shape((9, 9), tail=3), Shape((7, 2)), Shape((12, 5), tail=1)])
def test_a_foreign_policy_keeps_what_the_loop_keeps(shape: Shape, total: int) -> None:
    """Norms of values, fading; 3 sinks and 16 recent tokens, as far as there is room."""
    params = {"half_life": 8.0, "num_sinks": 3}
    pipeline = resolve("fading", params).bind(3, 2, 4, shape.block_size)
    view = make_view(shape, 0)
    selection = compress_layer(pipeline, view, total)
    counts = selection.page_counts.tolist()
    assert sum(counts) == total
    kept = rows_of(selection.kept_indices, counts, shape.block_size)
    for head, count, actual in zip(oracles.heads_of(view), counts, kept, strict=True):
        num_kept = count * shape.block_size
        sure = oracles.protected(head, num_kept, 3, 16, 0.0)
        norms = [math.sqrt(sum(float(x) ** 2 for x in value)) for value in head.values]
        scores = [
            norm * 0.5 ** ((head.size - j) / 8.0) for j, norm in enumerate(norms[: head.size])
        ]
        others = [j for j in range(head.size) if j not in sure]
        best = oracles.best(others, scores, num_kept - len(sure))
        assert actual == sorted(sure | set(best))


@pytest.mark.usefixtures("fading")
def test_a_foreign_policy_takes_the_modifiers_that_fit() -> None:
    assert [part.name for part in describe("fading+momentfix")] == ["fading", "momentfix"]
    with pytest.raises(ConfigError, match="scores of fading are no attention mass per head"):
        describe("fading+criticalkv")
    with pytest.raises(ConfigError, match="fading and snapkv each decide on their own"):
        describe("fading+snapkv")


HEAD = """
from dataclasses import dataclass
from vllm_kvcompress.policies import Modifier, Policy, Stages, parameter

"""
WHOLE = """
@dataclass(frozen=True)
class Mine(Policy):
    name = "mine"
    paper = "none"
    summary = "Keys as they are."
    stages = Stages(score="the first number of the key")
    takes = ("window",)

    def score(self, view):
        return view.kv.keys()[:, :, 0].float()
"""


def with_field(name: str, default: float) -> str:
    """The policy's code with a parameter that is at least 0."""
    field = f'    {name}: float = parameter({default}, "a number", 0)\n\n'
    return WHOLE.replace("    def score", field + "    def score")


def test_a_policy_says_which_modifiers_it_takes(package: Install) -> None:
    package(HEAD + WHOLE, "other_policy:Mine")
    assert resolve("mine+window").protection.recent_fraction == 0.1
    assert registry.bases_of(registry.modifiers()["window"])[-1] == "mine"


def test_parameters_of_one_name_are_refused(package: Install) -> None:
    code = WHOLE.replace(
        "    def score", '    recent_fraction: float = parameter(0.5, "x")\n\n    def score'
    )
    package(HEAD + code, "other_policy:Mine")
    with pytest.raises(ConfigError, match="mine and window both have a parameter recent_fraction"):
        resolve("mine+window")


@pytest.mark.parametrize(
    ("code", "value", "sentence"),
    [
        (
            "import nowhere",
            "other_policy:Mine",
            "can be imported, found ModuleNotFoundError: No mod",
        ),
        (
            "raise ValueError('a\\nb')",
            "other_policy:Mine",
            "found ValueError: a b; repair the pack",
        ),
        (HEAD + WHOLE, "other_policy:Yours", "found AttributeError: .*'Yours'"),
        (HEAD + WHOLE, "other_policy", "expected a frozen dataclass .* found <module"),
        ("Mine = int", "other_policy:Mine", "found <class 'int'>"),
        (
            HEAD + WHOLE.replace("@dataclass(frozen=True)", ""),
            "other_policy:Mine",
            "a class that is none",
        ),
        (HEAD + WHOLE.replace("frozen=True", ""), "other_policy:Mine", "a class that is none"),
        (HEAD + WHOLE.replace('paper = "none"', ""), "other_policy:Mine", "found paper = None"),
        (HEAD + WHOLE.replace('"mine"', '"a+b"'), "other_policy:Mine", r"the name 'a\+b'"),
        (HEAD + WHOLE.replace("def score", "def scores"), "other_policy:Mine", "one without score"),
        (
            HEAD
            + WHOLE.replace("    def score", '    x: int = parameter(-1, "x", 0)\n\n    def score'),
            "other_policy:Mine",
            r"a default that is refused \(x: expected at least 0",
        ),
        (
            HEAD + WHOLE.replace('"mine"', '"snapkv"'),
            "other_policy:Mine",
            'found "snapkv", which vllm_kvcompress.policies.snapkv has; rename it, or uninstall',
        ),
    ],
)
@pytest.mark.parametrize("policy", ["snapkv", "keydiff+window"])
def test_a_broken_policy_is_refused_with_the_name_of_its_package(
    package: Install, code: str, value: str, sentence: str, policy: str
) -> None:
    """Any lookup is refused, since processes must know the same policies."""
    package(code, value)
    with pytest.raises(ConfigError, match=sentence) as refused:
        resolve(policy)
    assert f"package other ({value}): expected" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_in_the_tree_is_found_by_being_there(
    tmp_path: Path, fresh_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's example, in a folder that is added to the package's path."""
    (code,) = foreign_policy.blocks("python")
    (tmp_path / "fading_values.py").write_text(code)
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    assert list(registry.policies())[-1] == "fading"
    assert registry.policies()["fading"].__module__ == "vllm_kvcompress.policies.fading_values"
    assert resolve("fading", {"num_sinks": 7}).protection.num_sinks == 7
    del sys.modules["vllm_kvcompress.policies.fading_values"]


def test_only_policies_of_this_package_are_known_by_default(fresh_registry: None) -> None:
    modules = {policy.__module__.partition(".")[0] for policy in registry.all_policies()}
    assert modules == {"vllm_kvcompress"}
    assert all(issubclass(policy, Policy) for policy in registry.policies().values())
