"""The servers of a long run: every policy, every trigger, and pools that are too small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MERGING = ("d2o", "h2o+cam")  # which refuse protected tokens
EVICTING = (
    *("streamingllm", "knorm", "keydiff", "leverage", "tova", "h2o", "snapkv", "pyramidkv"),
    *("adakv", "expected", "rkv", "spans", "adakv+criticalkv", "keydiff+window", "snapkv+obcache"),
    *MERGING,
)


@dataclass(frozen=True)
class Setup:
    """One server's configuration.

    Attributes:
        name: of it.
        policy: the server's own.
        trigger: when requests are compressed.
        num_blocks: of the pool, each of 32 tokens.
        max_tokens: of a prompt and its answer.
        budget: what is kept.
        chooses: requests choose among `EVICTING` and none, and a budget.
        reuses: contexts that requests name are kept for others.
        converses: what requests leave is kept for those that begin with the same tokens.
        reads: how much of what is held a decode step reads; requests choose another part, unless
            chunks of prompts read as much.
        recalls: the reference model, which answers from its context, serves two tenants.
        profile: file name of the profile that the policy needs.
        concurrency: requests at a time, at most.
        answer_tokens: of an answer, in the mean.
        ceiling: tokens that a request holds at most, of which requests choose fewer; 0: any.
        protects: requests name tokens of their prompts that are not evicted, or not all.
        more: other settings of this package.
        storms: most prompts are short and their answers long, so that requests that came in
            together outgrow the pool, and some are preempted.
    """

    name: str
    policy: str
    trigger: str = "prompt"
    num_blocks: int = 120
    max_tokens: int = 640
    budget: float = 0.3
    chooses: bool = False
    reuses: bool = False
    converses: bool = False
    reads: str | None = None
    recalls: bool = False
    profile: str | None = None
    concurrency: int = 16
    answer_tokens: int = 16
    ceiling: int = 0
    protects: bool = False
    more: tuple[tuple[str, Any], ...] = ()
    storms: bool = False

    @property
    def answers_depend_on_load(self) -> bool:
        """Whether a request is compressed when others need room, or goes on from another's."""
        return "pressure" in self.trigger or self.converses

    @property
    def chooses_read(self) -> bool:
        """Whether requests choose how much is read of them."""
        return self.reads is not None and "prefill" not in self.reads

    def settings(self, folder: str) -> dict[str, Any]:
        """Returns this package's settings; profiles are read from the folder."""
        settings: dict[str, Any] = {
            "policy": self.policy,
            "budget": self.budget,
            "trigger": self.trigger,
            "min_tokens": 40,
        }
        if self.chooses:
            others = (*EVICTING, *(() if self.ceiling else ("none",)))
            settings |= {"request_policies": [p for p in others if p != self.policy]}
            settings |= {"min_request_budget": 0.1, "max_request_budget": 0.8}
        if self.ceiling:
            settings |= {"ceiling": self.ceiling, "min_request_ceiling": MIN_CEILING}
        if self.reuses:
            settings["reuse_contexts"] = True
        if self.converses:
            settings["reuse_conversations"] = "reuse"
        if self.reads is not None:
            settings |= {"read": self.reads, "read_min_tokens": 40}
        if self.chooses_read:
            settings["min_request_read"] = 0.2
        if self.profile is not None:
            settings["profile"] = f"{folder}/{self.profile}"
        return settings | dict(self.more)

    def engine(self) -> dict[str, Any]:
        """Returns the keyword arguments of vLLM's engine."""
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": self.max_tokens,
            "num_gpu_blocks_override": self.num_blocks,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 2 * self.concurrency,
        }


MIN_CEILING = 128
UNDER_CEILING: dict[str, Any] = {
    **{"ceiling": 224, "max_tokens": 800, "answer_tokens": 40, "chooses": True, "reuses": True}
}
SETUPS = (
    Setup("prompt", "adakv", "prompt,decode:24", chooses=True, reuses=True),
    Setup(
        "storm", "spans", num_blocks=40, max_tokens=640, chooses=True, concurrency=32, storms=True
    ),
    Setup("chunk", "snapkv", "chunk:96,decode:24", num_blocks=48, chooses=True),
    Setup("beyond", "adakv", "chunk:96,decode:24", num_blocks=32, max_tokens=1024, budget=0.2),
    Setup("ceiling", "spans", num_blocks=60, budget=1.0, **UNDER_CEILING),
    Setup(
        "ceilings", "keydiff", "chunk:160,decode:56,pressure:0.8", num_blocks=64, **UNDER_CEILING
    ),
    Setup("pressure", "snapkv", "pressure:0.6", num_blocks=64, chooses=True),
    Setup("tenants", "adakv+criticalkv", num_blocks=90, budget=0.5, reuses=True, recalls=True),
    Setup("momentkv", "momentkv", "prompt,decode:24", num_blocks=64, reuses=True, budget=0.5),
    Setup("kvmerger", "kvmerger", "chunk:128", num_blocks=56, budget=0.5),
    Setup("asymkv", "asymkv", "prompt,decode:32", num_blocks=56, budget=0.5),
    Setup("kvslimmer", "kvslimmer", "chunk:160,decode:24", num_blocks=56, budget=0.5),
    Setup("momentfix", "snapkv+momentfix", "pressure:0.7", num_blocks=64, budget=0.5),
    Setup("headkv", "headkv", num_blocks=56, profile="headkv.json"),
    Setup("duoattention", "duoattention", num_blocks=56, budget=0.5, profile="duo"),
    Setup("turns", "adakv", num_blocks=240, converses=True, more=(("spill", 0.05),)),
    Setup("protected", "h2o", "prompt,decode:40", protects=True, chooses=True, reuses=True),
    Setup(
        "fair",
        "adakv+criticalkv",
        "chunk:128,decode:24",
        num_blocks=64,
        protects=True,
        chooses=True,
        more=(("protect_mode", "fair"), ("shadow", 0.2)),
    ),
    Setup("reading", "adakv", "chunk:256", num_blocks=64, chooses=True, reads="quest:0.3"),
    Setup(
        "prefill",
        "adakv",
        num_blocks=44,
        chooses=True,
        reads="longcache:global=32,local=64,top=2,prefill=96",
    ),
)
BY_NAME = {setup.name: setup for setup in SETUPS}
