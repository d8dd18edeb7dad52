"""What a paper's file defines: a policy, or a modifier of other policies.

Both are frozen dataclasses whose fields are their parameters, made by `parameter`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Merger
from vllm_kvcompress.policies.parts.allocation import Allocator
from vllm_kvcompress.policies.parts.parameters import Parameter
from vllm_kvcompress.policies.parts.selection import NOTHING_PROTECTED, Protection, Selector
from vllm_kvcompress.policies.pipeline import Pipeline


class Stages(NamedTuple):
    """What users read about each stage of the pipeline; empty: as in the policy underneath."""

    score: str = ""
    protect: str = ""
    allocate: str = ""
    select: str = ""
    merge: str = ""
    correct: str = ""

    def non_empty(self) -> dict[str, str]:
        """Descriptions that are not empty by stage, in the order in which stages run."""
        return {stage: does for stage, does in self._asdict().items() if does}


class Part(ABC):
    """Part of a policy string, and what users read about it.

    Attributes:
        name: as written in a policy string.
        paper: title and arXiv number; the first paragraph of the module's docstring, unless set.
        summary: one sentence; the first line of the class's docstring, unless set.
        stages: what it does in each stage of the pipeline.
        profile: kind of profile file that it needs, or None.
        refuses: parts that it cannot be combined with, and why; `{}` stands for the other's name.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    stages: ClassVar[Stages]
    profile: ClassVar[str | None] = None
    refuses: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        module = sys.modules[cls.__module__].__doc__
        if "name" in vars(cls) and "paper" not in vars(cls) and module:
            cls.paper = " ".join(module.partition("\n\n")[0].split()).removesuffix(".")
        if "name" in vars(cls) and "summary" not in vars(cls) and cls.__doc__:
            cls.summary = cls.__doc__.partition("\n")[0]

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """Lists the parameters that users can set: the fields that `parameter` made."""
        part: Any = cls  # parts are dataclasses, which this class is not
        settable: list[Any] = [each for each in fields(part) if "meaning" in each.metadata]
        return tuple(Parameter(each.name, each.default, **each.metadata) for each in settable)

    def with_profile(self, path: Path) -> Self:
        """The part with measured heads.

        Raises:
            ConfigError: the file cannot be read, or is not of that kind.
        """
        raise NotImplementedError


class Policy(Allocator, Selector, Part):
    """Scores tokens, and overrides what differs from the defaults.

    Defaults: nothing is protected, heads get the same budget, the highest scores are selected, and
    evicted tokens are dropped.

    Attributes:
        decides: which parts of the budget it decides on; two policies that decide on the same part
            exclude each other.
        takes: names of modifiers that it accepts, besides those that name it themselves.
    """

    decides: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 importance of each token; higher is kept, padding may hold anything."""

    @property
    def protection(self) -> Protection:
        """Tokens that are kept whatever their score."""
        return NOTHING_PROTECTED

    @property
    def allocator(self) -> Allocator:
        """Part that gives layers and heads their pages."""
        return self

    @property
    def selector(self) -> Selector:
        """Part that selects the tokens of each head."""
        return self

    @property
    def merger(self) -> Merger | None:
        """Part that merges evicted tokens; None: they are dropped."""
        return self if isinstance(self, Merger) else None

    def pipeline(self) -> Pipeline:
        """Pipeline of the policy's parts."""
        parts = (self, self.allocator, self.selector, self.protection, self.merger)
        return Pipeline(self.name, *parts)


class Modifier(Part):
    """Replaces parts of another policy.

    Attributes:
        goes_on: policies that it can modify.
        otherwise: why it cannot modify others, unless `refuses` says so; `{}` as there.
    """

    goes_on: ClassVar[tuple[str, ...]] = ()
    otherwise: ClassVar[str] = "{} is none of the policies that it was made for"

    @classmethod
    def fits(cls, policy: type[Policy]) -> bool:
        """Whether it can modify a policy."""
        return policy.name in cls.goes_on or cls.name in policy.takes

    @abstractmethod
    def modify(self, base: Pipeline) -> Pipeline:
        """Replaces parts of a pipeline, whose `params` are the parameters of all parts."""
