"""What a paper's file defines: a policy, or a modifier that goes on others.

Both are frozen dataclasses whose fields are their parameters, made by `parameter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Merger, Needs
from vllm_kvcompress.policies.parts.allocation import Allocator
from vllm_kvcompress.policies.parts.parameters import Parameter, parameters_of
from vllm_kvcompress.policies.parts.protection import NOTHING_PROTECTED, Protection
from vllm_kvcompress.policies.parts.selection import Selector
from vllm_kvcompress.policies.pipeline import Pipeline


class Stages(NamedTuple):
    """What users read of each stage of the pipeline; empty: as in the policy underneath."""

    score: str = ""
    protect: str = ""
    allocate: str = ""
    select: str = ""
    merge: str = ""
    correct: str = ""

    def said(self) -> dict[str, str]:
        """The stages that are not empty, in the order in which they run."""
        return {stage: does for stage, does in self._asdict().items() if does}


class Part(ABC):
    """A part of a policy string, and what users read of it.

    Attributes:
        name: as written in a policy string.
        paper: title and arXiv number.
        summary: one sentence.
        stages: what it does in each stage of the pipeline.
        profile: kind of profile file that it needs, or None.
        refuses: other parts that it does not go with, and why; `{}` stands for the other's name.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    stages: ClassVar[Stages]
    profile: ClassVar[str | None] = None
    refuses: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """What can be set."""
        return parameters_of(cls)

    def with_profile(self, path: Path) -> Self:
        """The same with measured heads.

        Raises:
            ConfigError: the file cannot be read, or is none of that kind.
        """
        raise NotImplementedError


class Policy(Allocator, Selector, Part):
    """Scores tokens, and says what else differs from the plainest way.

    That is: nothing protected, the same budget for all, highest scores, evicted tokens dropped.

    Attributes:
        decides: what of the budget it decides on; two policies that do so exclude each other.
        takes: names of modifiers that go on it, beside those that name it themselves.
    """

    decides: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> Needs:
        """What the engine has to hand over besides keys."""
        return Needs()

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 importance of each token; higher is kept, padding may hold anything."""

    @property
    def protection(self) -> Protection:
        """Tokens that are kept whatever their score."""
        return NOTHING_PROTECTED

    @property
    def allocator(self) -> Allocator:
        """Pages per layer and head."""
        return self

    @property
    def selector(self) -> Selector:
        """Tokens per head."""
        return self

    @property
    def merger(self) -> Merger | None:
        """What becomes of the others; None: nothing."""
        return self if isinstance(self, Merger) else None

    def pipeline(self) -> Pipeline:
        """Its parts."""
        parts = (self, self.allocator, self.selector, self.protection, self.merger)
        return Pipeline(self.name, *parts)


class Modifier(Part):
    """Replaces parts of another policy.

    Attributes:
        goes_on: policies that it goes on.
        otherwise: why not on others, unless `refuses` says so; `{}` likewise.
    """

    goes_on: ClassVar[tuple[str, ...]] = ()
    otherwise: ClassVar[str] = "{} is none of the policies that it was made for"

    @classmethod
    def fits(cls, policy: type[Policy]) -> bool:
        """Whether it goes on a policy."""
        return policy.name in cls.goes_on or cls.name in policy.takes

    @abstractmethod
    def modify(self, base: Pipeline) -> Pipeline:
        """Another pipeline, `base.params` being the parameters of all parts."""
