"""MLA: stock at budget 1.0, and compressed what plain loops compute from the kept latent rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

BLOCK, NUM_LAYERS, RANK = 16, 3, 512
LONG, SHORT, MIDDLE = prompt(700, seed=1), prompt(50, seed=2), prompt(300, seed=3)
CONTEXT = 640  # tokens of the long prompt that a request names as its context
POLICIES = ["snapkv", "keydiff", "h2o", "spans", "adakv+criticalkv", "leverage", "knorm"]
SETTINGS = {
    "policy": "snapkv",
    "budget": 0.25,
    "trigger": ["prompt", "decode:32"],
    "request_policies": POLICIES,
    "min_request_budget": 0.25,
    "max_request_budget": 1.0,
}
ENGINE = {"attention_backend": "CPU_MLA", "max_model_len": 1024}
TOGETHER = [request("long", LONG), request("short", SHORT, at_step=2), request("mid", MIDDLE)]


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
    whole = [{**one, "id": f"whole {one['id']}", "xargs": {"kv_budget": 1.0}} for one in TOGETHER]
    alone = [request(name, LONG, xargs={"kv_policy": name}) for name in POLICIES]
    generating = request("generating", LONG, 80)
    named = request("named", LONG, xargs={"kv_context_tokens": CONTEXT})
    return run_engine(
        model,
        [*([each] for each in (*alone, generating, named)), TOGETHER, whole],
        settings=SETTINGS,
        record_kept=True,
        environment={"KVCOMPRESS_CHECK": "1"},
        asynchronous=True,
        long_prefill_token_threshold=256,
        **ENGINE,
    )


class LatentDecoder:
    """A DeepSeek V2 that reads chosen tokens of its context, each projected from its latent row.

    Args:
        model: directory of the model.
        context: token ids, which are read densely.
        kept: kept[layer] = positions, among the first `num_full` tokens, that stay.
        num_full: tokens of the context's full blocks; those behind them always stay.
    """

    def __init__(
        self, model: str, context: list[int], kept: list[list[int]], num_full: int
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.num_tokens, inputs = len(context), list[Tensor]()
        for layer in self.model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, __, given: inputs.append(given["hidden_states"][0]), with_kwargs=True
            )
        with torch.no_grad():
            self.first_logits = self.model(torch.tensor([context])).logits[0, -1]
            rows = [self.rows_of(layer, hidden, 0) for layer, hidden in enumerate(inputs)]
        stay = range(num_full, len(context))
        self.rows = [[of_layer[at] for at in (*kept[i], *stay)] for i, of_layer in enumerate(rows)]

    def turned(self, vectors: Tensor, first: int) -> Tensor:
        """Rotates [tokens, ..., 64] by their positions, the first of which is given."""
        rotary, turned = self.model.model.rotary_emb, torch.empty_like(vectors)
        for number, vector in enumerate(vectors):
            angles = (first + number) * rotary.inv_freq
            cos, sin = (f(angles) * rotary.attention_scaling for f in (torch.cos, torch.sin))
            even, odd = vector[..., ::2], vector[..., 1::2]
            turned[number, ..., ::2] = even * cos - odd * sin
            turned[number, ..., 1::2] = odd * cos + even * sin
        return turned

    def rows_of(self, layer: int, hidden: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
        """Returns latent vector and rotated key of tokens."""
        attention = self.model.model.layers[layer].self_attn
        both = attention.kv_a_proj_with_mqa(hidden)
        latents, keys = attention.kv_a_layernorm(both[:, :RANK]), self.turned(both[:, RANK:], first)
        return list(zip(latents, keys, strict=True))

    def forget(self, kept: list[list[int]]) -> None:
        """Drops rows of full blocks that are not kept; a partial block stays."""
        for layer, places in enumerate(kept):
            rows = self.rows[layer]
            self.rows[layer] = [*(rows[at] for at in places), *rows[len(rows) // BLOCK * BLOCK :]]

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Appends a token and returns the logits after it, [vocabulary]."""
        inner = self.model.model
        hidden = inner.embed_tokens(torch.tensor([token]))
        for number, layer in enumerate(inner.layers):
            hidden = hidden + self._attend(number, layer.self_attn, layer.input_layernorm(hidden))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.num_tokens += 1
        return self.model.lm_head(inner.norm(hidden))[0]

    def _attend(self, number: int, attention: Any, hidden: Tensor) -> Tensor:
        self.rows[number] += self.rows_of(number, hidden, self.num_tokens)
        heads, nope = attention.num_heads, attention.qk_nope_head_dim
        queries = attention.q_proj(hidden).view(heads, -1)
        rotated = self.turned(queries[None, :, nope:], self.num_tokens)[0]
        projections = attention.kv_b_proj.weight.view(heads, -1, RANK)
        outputs = []
        for head in range(heads):
            up_key, up_value = projections[head, :nope], projections[head, nope:]
            rows = self.seen(number, head)
            keys = [torch.cat((up_key @ latent, key)) for latent, key in rows]
            query = torch.cat((queries[head, :nope], rotated[head]))
            logits = torch.stack([query @ key for key in keys]) * attention.scaling
            values = torch.stack([up_value @ latent for latent, _ in rows])
            outputs.append(torch.softmax(logits, 0) @ values)
        return attention.o_proj(torch.cat(outputs)[None])

    def seen(self, layer: int, head: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the rows that a query head attends to: all."""
        return self.rows[layer]


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


def attentions(model: str, tokens: list[int]) -> tuple[Tensor, ...]:
    """Returns each layer's [1, heads, queries, tokens] attention."""
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        given: tuple[Tensor, ...]
        given = reference(torch.tensor([tokens]), output_attentions=True).attentions
    return given


def check_logits(logits: Tensor, logprobs: dict[str, float], where: Any) -> None:
    """Asserts that the engine's log-probabilities of a token are those of some logits."""
    expected = torch.log_softmax(logits, dim=-1)
    for token, found in logprobs.items():
        assert found == pytest.approx(float(expected[int(token)]), abs=2e-4), where


def records(report: dict[str, Any], event: int) -> list[list[int]]:
    """Returns what each layer keeps at one of the events of requests that are alone."""
    part = report["kept"][event * NUM_LAYERS :][:NUM_LAYERS]
    assert [record["layer"] for record in part] == list(range(NUM_LAYERS))
    return [record["kept"] for record in part]


def check_decoding(
    decoder: LatentDecoder, report: dict[str, Any], name: str, events: dict[int, int]
) -> None:
    """Asserts that a request reads what a decoder does; its `events` by position.

    A token is computed before the event at its end.
    """
    output = report["outputs"][name]
    tokens, first = [*LONG, *output["tokens"]], decoder.num_tokens
    for at in range(first, len(tokens) - 1):
        logits = decoder.step(tokens[at])
        if at + 1 >= len(LONG):
            number = at + 1 - len(LONG)
            check_logits(logits, output["logprobs"][number], (name, number))
        if (event := events.get(at + 1)) is not None:
            decoder.forget(records(report, event))


def test_budget_one_gives_the_tokens_and_logprobs_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    for name, expected in stock.items():
        found = report["outputs"][f"whole {name}"]
        assert found["tokens"] == expected["tokens"], name
        for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5), name


def test_a_quarter_frees_blocks_behind_the_first_token_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    output = report["outputs"]["long"]
    assert output["tokens"][0] == stock["long"]["tokens"][0]
    assert output["tokens"] != stock["long"]["tokens"]
    assert report["outputs"]["short"]["tokens"] == stock["short"]["tokens"]
    assert output["tokens"] == report["outputs"]["snapkv"]["tokens"], "together = alone"
    for event in report["events"][: len(POLICIES)]:
        assert (event["blocks_freed"], event["blocks_written"]) == (43, 11)
    assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_reads_the_kept_latent_rows(
    model: str, report: dict[str, Any], policy: str
) -> None:
    kept, output = records(report, POLICIES.index(policy)), report["outputs"][policy]
    assert all(9 * BLOCK <= len(set(rows)) == len(rows) <= 11 * BLOCK for rows in kept)  # + state
    decoder = LatentDecoder(model, LONG, kept, len(LONG) // BLOCK * BLOCK)
    check_logits(decoder.first_logits, output["logprobs"][0], 0)
    check_decoding(decoder, report, policy, {})


def test_later_events_keep_some_of_the_rows_that_were_kept(
    model: str, report: dict[str, Any]
) -> None:
    """Events after 32 and 64 generated tokens, in place."""
    first, num_full = len(POLICIES), len(LONG) // BLOCK * BLOCK
    decoder = LatentDecoder(model, LONG, records(report, first), num_full)
    events = {len(LONG) + 32: first + 1, len(LONG) + 64: first + 2}
    check_decoding(decoder, report, "generating", events)
    assert report["events"][first + 2]["blocks_written"] == 0


def test_the_rest_of_a_prompt_reads_the_kept_rows_of_its_context(
    model: str, report: dict[str, Any]
) -> None:
    """The rest has an event, too, so that its chunks are behind two contexts."""
    first = len(POLICIES) + 3
    decoder = LatentDecoder(model, LONG[:CONTEXT], records(report, first), CONTEXT)
    check_decoding(decoder, report, "named", {CONTEXT + 32: first + 1, CONTEXT + 64: first + 2})


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
