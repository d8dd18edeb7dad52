"""Measures what compression costs in attention, by layer and query head, in the serving engine.

    python scripts/measure/attention_loss.py MODEL --data questions.jsonl \\
        --policies snapkv,keydiff --budgets 0.25 --out loss/

Takes the options of `vllm-kvcompress eval`. For queries after a request's first event (the last 64
of a step) the engine's outputs are compared with attention of the same queries over all tokens, in
fp32: keys and values are copied before an event reads them. The hidden states are those of the
compressed run, so each layer is judged by itself. Questions are asked one by one, events run one by
one and layer by layer, and CUDA graphs are piecewise: do not take times from such a run.

DIR/loss.json has a row per setting and mode: `mass`, the share of the attention weights on tokens
that were not evicted; `error`, |o - o_full| / |o_full|; and what else `AttentionLoss.means` says.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from torch import Tensor
from tqdm import tqdm

from attention_sums import AttentionLoss
from vllm_kvcompress.cli import eval as eval_command
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.merging.moments import unpack_moments
from vllm_kvcompress.policies.base import LayerView, Needs, Selection
from vllm_kvcompress.tools.engine_process import EngineProcess
from vllm_kvcompress.tools.evaluation.engine import Question
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt
from vllm_kvcompress.tools.evaluation.runner import LOG, Plan
from vllm_kvcompress.tools.evaluation.setups import AWARE, PREPARED, TEXT, Setup
from vllm_kvcompress.tools.evaluation.summary import percent
from vllm_kvcompress.tools.files import make_folder, write_whole
from vllm_kvcompress.vllm_plugin.compat.engine import greedy
from vllm_kvcompress.vllm_plugin.compat.layers import attention_layers
from vllm_kvcompress.vllm_plugin.worker_side.groups import layer_weights

Heads = dict[str, list[list[float]]]  # figures by name, layer and head


class Watch:
    """Looks on while a cache group of a worker serves; its runner's `EventObserver`.

    Attributes:
        loss: the sums.
    """

    def __init__(self, group: Any, loss: AttentionLoss) -> None:
        self.loss = loss
        self._group, self._finish_layer = group, type(group).finish_layer
        group.runner.observer, group.finish_layer = self, self.finish_layer

    def compressed(
        self, event: Event, layer: int, view: LayerView, values: Tensor, selection: Selection
    ) -> None:
        """Copies what a layer's part of an event evicts."""
        moments, state = None, selection.merged.state
        if event.pipeline.corrects and state is not None:
            moments = unpack_moments(state, view.kv.head_size)
        self.loss.compress(event.plan, layer, event.slot, view, values, selection, moments)

    def finish_layer(
        self, work: Any, layer: int, metadata: Any, queries: Tensor, outputs: Tensor, *window: Any
    ) -> None:
        """Compares outputs of compressed requests, before the layer's events run."""
        scale = self._group.scales[layer]
        for batch in work.compressed:
            starts, lengths = metadata.query_start_loc, metadata.seq_lens
            self.loss.observe(layer, batch, starts, lengths, queries, outputs, scale)
        self._finish_layer(self._group, work, layer, metadata, queries, outputs, *window)


def watch(worker: Any) -> None:
    """Begins to look on at all cache groups of a worker."""
    worker.kvcompress_watches = watches = []
    for group in worker.compression.groups.values():
        weights = output_weights(worker, group)
        watches.append(Watch(group, AttentionLoss(group.tables.pool, group.softcap, weights)))


def output_weights(worker: Any, group: Any) -> list[Tensor]:
    """Returns o_proj of a group's layers, each [num_query_heads, head_size, hidden size]."""
    model, needs = worker.model_runner.model, Needs(output_weight=True)
    layers = attention_layers(worker.vllm_config, list(group.layer_index))
    weights = [layer_weights(layer, model, needs).output_weight for layer in layers]
    return [weight.transpose(1, 2).flatten(0, 1) for weight in weights if weight is not None]


def watched(worker: Any) -> Heads:
    """Returns `AttentionLoss.means` since `watch`, layers of all cache groups one after another."""
    heads: Heads = defaultdict(list)
    for each in worker.kvcompress_watches:
        for name, layers in each.loss.means().items():
            heads[name] += layers
    return dict(heads)


def measure(llm: Any, question: Question) -> Heads:
    """Asks one question in the engine's process, and returns what its attention has lost."""
    params = greedy(
        max_tokens=question.max_tokens,
        extra_args=question.extra_args,
        prompt_logprobs=0 if question.predicted else None,  # no prefix-cache hits
    )
    llm.collective_rpc(watch)
    prompt = {"prompt_token_ids": question.prompt}
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    if output.outputs[0].finish_reason == "error":
        raise ValueError("a question failed in the engine; its log says why.")
    heads: Heads = llm.collective_rpc(watched)[0]
    return heads


def engine_options(engine: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of `vllm.LLM` with piecewise CUDA graphs.

    Replayed graphs of whole steps run no Python, so nothing could be measured.
    """
    compilation = engine.get("compilation_config") or {}
    if isinstance(compilation, int):  # vLLM's short form
        compilation = {"mode": compilation}
    if compilation.get("cudagraph_mode") == "NONE":
        return engine
    return engine | {"compilation_config": compilation | {"cudagraph_mode": "PIECEWISE"}}


def means(figures: Sequence[Heads]) -> Heads:
    """Mean over questions, by name, layer and head."""
    return {
        name: [
            [round(fmean(values), 5) for values in zip(*layer, strict=True)]
            for layer in zip(*(heads[name] for heads in figures), strict=True)
        ]
        for name in (figures[0] if figures else ())
    }


def rows(plan: Plan, setup: Setup, engine: EngineProcess, advance: Any) -> list[dict[str, Any]]:
    """Asks all questions at one setup; returns a row for each mode."""
    tokenizer = load_tokenizer(plan.model)
    figures: dict[str, list[Heads]] = defaultdict(list)
    for mode, number in plan.open_questions(setup, set()):
        item = plan.items[number]
        question = Question(
            *split_prompt(tokenizer, item, plan.engine.get("max_model_len")),
            item.max_tokens,
            agnostic=mode != AWARE,
            predicted=mode == TEXT,
        )
        if heads := engine.call(question):
            figures[mode].append(heads)
        advance()
    return [
        {"setup": setup.name, "mode": mode, "questions": len(some), "heads": means(some)}
        for mode, some in figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    eval_command.add_options(parser)
    options = parser.parse_args()
    plan = eval_command.plan_of(options)
    if plan.base_url or PREPARED in plan.modes:
        raise ConfigError("expected neither --base-url nor --mode prepared; leave them out.")
    make_folder(options.out)
    setups = [(each, each.settings(plan.params)) for each in plan.setups]
    setups = [(setup, settings) for setup, settings in setups if settings is not None]
    all_rows = []
    with tqdm(total=sum(len(plan.open_questions(each, set())) for each, _ in setups)) as bar:
        for setup, settings in setups:
            arguments = engine_options(plan.engine), options.out / LOG, measure
            with EngineProcess(plan.model, settings, *arguments) as engine:
                all_rows += rows(plan, setup, engine, bar.update)
    write_whole(options.out / "loss.json", json.dumps(all_rows, indent=2) + "\n")
    print("| setup | mode | mass | error |\n|---|---|---|---|")
    for row in all_rows:
        mass, error = (percent(fmean(map(fmean, row["heads"][name]))) for name in ("mass", "error"))
        print(f"| `{row['setup']}` | {row['mode']} | {mass} | {error} |")


if __name__ == "__main__":
    main()
