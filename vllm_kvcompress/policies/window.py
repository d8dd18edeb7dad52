"""A share of the budget for recent tokens, as KeyDiff's authors do (arXiv 2504.15364)."""

from dataclasses import dataclass, replace

from vllm_kvcompress.policies import Modifier, Pipeline, Protection, Stages, parameter
from vllm_kvcompress.policies.keydiff import KeyDiff


@dataclass(frozen=True)
class Window(Modifier):
    """Protects recent tokens under policies that protect nothing."""

    name = "window"
    paper = KeyDiff.paper
    summary = "Keeps a share of the budget for the most recent tokens."
    stages = Stages(protect="the most recent recent_fraction of the budget")
    goes_on = ("keydiff", "knorm", "tova")
    otherwise = "{} already says which recent tokens it keeps"

    recent_fraction: float = parameter(0.1, "part of the budget for recent tokens", 0.0, 1.0)

    def modify(self, base: Pipeline) -> Pipeline:
        return replace(base, protection=Protection(recent_fraction=self.recent_fraction))
