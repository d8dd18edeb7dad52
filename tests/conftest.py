"""Settings of all tests: hypothesis without deadlines, long files first."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kernels.child import Child

# Machines that run tests are often busy.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# What tests import stays. To look through it again and again takes as long as many tests.
gc.disable()

# Inductor keeps what it generated, in steps as long as vectors are, by the graph alone: a run that
# is capped compiles that for shorter vectors, and half of every step is never computed.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))

Drafting = Callable[[str], tuple[str, dict[str, Any]]]

# Folders whose files take minutes. What runs at the end is short, so two processes end together.
LONG = ("gpu_path", "engine", "cli", "evaluation", "scripts", "kernels", "benchmark")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Child]:
    """A process in which Triton runs in its interpreter."""
    process = Child(interprets=True)
    yield process
    process.close()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(model_directory: Path) -> str:
    """The tiny Llama, which most tests serve."""
    from tests import tiny_models  # many tests need neither torch nor transformers

    return str(tiny_models.build("llama", model_directory))


@pytest.fixture(scope="session")
def drafting(model_directory: Path) -> Drafting:
    """By speculative method, a tiny model and the speculative config of what drafts for it."""
    from tests import draft_models

    return cache(partial(draft_models.build, model_directory / "with-drafts"))


@pytest.fixture(scope="session")
def no_padding(model_directory: Path) -> str:
    """A model whose padding token is not zero: a zero query would score all pages alike."""
    from tests import tiny_models

    def change(model: Any) -> None:
        table = model.model.embed_tokens.weight.data
        empty = (table == 0).all(dim=1)
        table[empty] = table[~empty][: int(empty.sum())].flip(1)

    return str(tiny_models.build("llama", model_directory / "no-padding", change=change))


def pytest_collection_finish() -> None:
    """Collects garbage from here on, among what the tests make."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first; with `--no-loadscope-reorder` processes take them in this order."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)
