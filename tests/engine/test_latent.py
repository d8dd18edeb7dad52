"""MLA: stock at budget 1.0, and compressed what plain loops compute from the kept latent rows."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.engine.latent_cases import (
    LONG,
    NAMED,
    TOGETHER,
    WHOLE,
    check_kept_rows,
    check_named_context,
    check_quarter,
    check_stock,
    settings_for,
)
from tests.engine.latent_oracle import (
    BLOCK,
    NUM_LAYERS,
    LatentDecoder,
    attentions,
    check_decoding,
    records,
)
from tests.engine.test_speculation import NGRAM, NOTED, REPEATING
from tests.tiny_models import prompt

POLICIES = ["snapkv", "keydiff", "h2o", "spans", "adakv+criticalkv", "leverage", "knorm"]
SETTINGS = settings_for(POLICIES)
ENGINE = {"attention_backend": "CPU_MLA", "max_model_len": 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.build("deepseek_v2", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def stock(model: str, run_engine: Run) -> dict[str, Any]:
    outputs: dict[str, Any] = run_engine(model, [TOGETHER], **ENGINE)["outputs"]
    return outputs


@pytest.fixture(scope="module")
def report(model: str, run_engine: Run) -> dict[str, Any]:
    """The engine's steps overlap, and it reads prompts in chunks, of which stock is not capable."""
    alone = [request(name, LONG, xargs={"kv_policy": name}) for name in POLICIES]
    generating = request("generating", LONG, 80)
    return run_engine(
        model,
        [*([each] for each in (*alone, generating, NAMED)), TOGETHER, WHOLE],
        settings=SETTINGS,
        record_kept=True,
        environment={"KVCOMPRESS_CHECK": "1"},
        asynchronous=True,
        long_prefill_token_threshold=256,
        **ENGINE,
    )


class RanksDecoder(LatentDecoder):
    """A decoder whose ranks have forgotten different rows, by the last query of their heads."""

    def __init__(self, model: str, context: list[int], num_kept: int) -> None:
        self.num_full = len(context) // BLOCK * BLOCK
        super().__init__(model, context, [list(range(self.num_full))] * NUM_LAYERS, self.num_full)
        self.kept: dict[tuple[int, int], set[int]] = {}
        for layer, attention in enumerate(attentions(model, context)):
            for rank in (0, 1):
                mass = attention[0, 2 * rank : 2 * rank + 2, -1, : self.num_full].sum(dim=0)
                order = sorted(range(self.num_full), key=lambda at: -float(mass[at]))
                self.kept[layer, rank] = set(order[:num_kept])

    def seen(self, layer: int, head: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the rows that the head's rank has."""
        kept = self.kept[layer, head // 2]
        rows = enumerate(self.rows[layer])
        return [row for at, row in rows if at >= self.num_full or at in kept]


def test_budget_one_gives_the_tokens_and_logprobs_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    for name, expected in stock.items():
        check_stock(report["outputs"][f"whole {name}"], expected)


def test_a_quarter_frees_blocks_behind_the_first_token_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    check_quarter(report, stock, len(POLICIES))


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_reads_the_kept_latent_rows(
    model: str, report: dict[str, Any], policy: str
) -> None:
    check_kept_rows(model, report, policy, POLICIES.index(policy))


def test_later_events_keep_some_of_the_rows_that_were_kept(
    model: str, report: dict[str, Any]
) -> None:
    """Events after 32 and 64 generated tokens, in place."""
    first, num_full = len(POLICIES), len(LONG) // BLOCK * BLOCK
    decoder = LatentDecoder(model, LONG, records(report, first), num_full)
    events = {len(LONG) + 32 * n: records(report, first + n) for n in (1, 2)}
    check_decoding(decoder, report, "generating", events)
    assert report["events"][first + 2]["blocks_written"] == 0


def test_the_rest_of_a_prompt_reads_the_kept_rows_of_its_context(
    model: str, report: dict[str, Any]
) -> None:
    check_named_context(model, report, len(POLICIES) + 3)


def test_snapkv_ranks_by_the_attention_of_all_query_heads(
    model: str, report: dict[str, Any]
) -> None:
    """Absorbed queries, on a row that is one head's key, give the attention of every head."""
    by_layer = attentions(model, LONG)
    for layer, kept in enumerate(records(report, 0)):
        last = len(LONG) - 32
        mass = by_layer[layer][0, :, last:].double().mean(dim=(0, 1)).tolist()
        scores = [max(mass[max(0, at - 3) : min(last, at + 4)]) for at in range(last)]
        best = sorted(scores, reverse=True)[: len([at for at in kept if at < last])]
        found = sorted((scores[at] for at in kept if at < last), reverse=True)
        assert found == pytest.approx(best, rel=1e-4)


def test_ranks_keep_rows_by_their_own_query_heads(
    model: str, report: dict[str, Any], stock: dict[str, Any], run_engine: Run
) -> None:
    """Every rank has all rows, and half of the query heads."""
    whole = request("whole", LONG, xargs={"kv_budget": 1.0})
    by_keys, by_heads = (request(p, LONG, xargs={"kv_policy": p}) for p in ("keydiff", "tova"))
    ranks = run_engine(
        model,
        [[by_keys, by_heads], [whole]],
        settings={**SETTINGS, "trigger": "prompt", "request_policies": ["keydiff", "tova"]},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "KVCOMPRESS_CHECK": "1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **ENGINE,
    )
    assert ranks["outputs"]["whole"]["tokens"] == stock["long"]["tokens"]
    one_rank = report["outputs"]["keydiff"]["tokens"]
    assert ranks["outputs"]["keydiff"]["tokens"] == one_rank, "keys are the same on all ranks"
    check_decoding(RanksDecoder(model, LONG, 11 * BLOCK), ranks, "tova", {})


@pytest.mark.parametrize("drafts", [NGRAM, REPEATING], ids=["ngram", "own-class"])
def test_drafts_are_verified_over_kept_rows(
    model: str, run_engine: Run, drafts: dict[str, Any]
) -> None:
    """Outputs and event positions are those without drafts, which are read as a chunk is.

    Prompts are read in one step: stock vLLM with drafts never schedules longer ones on CPUs.
    """
    tova = {"policy": "tova", "budget": 0.25, "trigger": "chunk:128,decode:20"}
    requests = [
        request("tova", prompt(700, 0), 60),
        request("keys", prompt(333, 1), 60, xargs={"kv_policy": "keydiff"}),
        request("whole", prompt(200, 2), 60, xargs={"kv_policy": "none"}),
    ]
    given: dict[str, Any] = {
        "settings": {**tova, "request_policies": ["keydiff", "none"]},
        "probes": [NOTED],
        "environment": {"KVCOMPRESS_CHECK": "1"},
        "max_num_batched_tokens": 1400,
        **ENGINE,
    }
    plain = run_engine(model, [requests], **given)
    found = run_engine(model, [requests], speculative_config=drafts, **given)
    assert 0 < found["drafts"][1] < found["drafts"][0]
    assert sorted(found["positions"]) == sorted(plain["positions"])
    for name, expected in plain["outputs"].items():
        assert found["outputs"][name]["tokens"] == expected["tokens"], name
