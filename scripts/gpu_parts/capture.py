"""Decode steps of all layers in CUDA graphs, replayed while everything they read moves. No vLLM.

    python -m gpu_parts.capture --mode graph --out FILE

Requests join, generate, are compressed and leave. Before every replay the buffers are filled, and
block tables, page tables and ring buffers lie elsewhere than before; what a stale address would
read is overwritten with page 0, which holds NaN. Each output is compared with attention in torch
over the same pages, and each remembered query with what was computed.

With `--mode eager` nothing is captured; run with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that freed
memory is unmapped and a stale address faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_parts.checks import largest_error
from gpu_parts.cuda_graph import capture_graph
from gpu_parts.whole_events import Cache, Model, make_pipeline
from vllm_kvcompress.attention.batch import ResidentBatch, ResidentBatches
from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels.attention import decode_attention
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.merging.moments import correct_with_moments
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

Row = dict[str, Any]
Work = Callable[[], Any]
POLICIES = ("snapkv", "kvslimmer", "momentkv")  # plain, with biases, with a correction
MODES = ("graph", "eager")
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-3}
OUTSIDERS = 3  # requests that take ring buffers in every round, so that these move
SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class CapturePlan:
    """What is captured and replayed.

    Attributes:
        policy: of the compressed requests.
        rows: sizes of captured steps.
        rounds: replays, of the sizes in turn.
        longest: tokens of a prompt, at most.
        num_layers: of the model; its other numbers are Llama-3.1-8B's, unless it is small.
        small: heads of 16 elements in fp32, for a CPU.
        block_size: tokens of a page.
        device: where.
    """

    policy: str = POLICIES[0]
    rows: tuple[int, ...] = (1, 4, 16)
    rounds: int = 30
    longest: int = 320
    num_layers: int = 32
    small: bool = False
    block_size: int = 16
    device: str = "cuda"

    @property
    def model(self) -> Model:
        """The shape of the model that is captured."""
        if not self.small:
            return Model(self.num_layers)
        shape = {"num_heads": 2, "group": 2, "head_size": 16, "hidden_size": 64}
        return Model(self.num_layers, **shape, dtype=torch.float32)  # type: ignore[arg-type]


@dataclass
class Request:
    """A request that generates.

    Attributes:
        num_tokens: logical tokens.
        blocks: ids by logical block; 0 where a block was given back.
        kept_blocks: ids of the blocks that hold what an event has kept.
        queries: [num_layers, num_query_heads, head_size] of each remembered token.
    """

    num_tokens: int
    blocks: list[int]
    kept_blocks: list[int] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)


class Traffic:
    """Requests over pages of random numbers, and the decode steps that attend for them."""

    def __init__(self, plan: CapturePlan) -> None:
        model, size = plan.model, plan.block_size
        self.plan, self.device = plan, torch.device(plan.device)
        self.draw = random.Random(0)
        blocks = (max(plan.rows) + 1) * (plan.longest + plan.rounds + 2 * size) // size + 8
        self.cache = Cache(model, blocks * size, size, plan.device)
        self.pool = self.cache.pool
        self.pool.pages[: self.pool.pages_per_block] = torch.nan  # block 0
        self.free = list(range(1, len(self.pool.pages) // self.pool.pages_per_block))
        pipeline = make_pipeline(plan.policy, model, size)
        self.pipeline, self.scale = pipeline, model.head_size**-0.5
        self.windows = QueryWindows(model.num_layers, pipeline.needs.window_size, self.device, 1)
        weights = [self.cache.weights] * model.num_layers
        tables, pipelines = PageTables(self.pool), {pipeline.name: pipeline}
        self.runner = EventRunner(tables, self.windows, pipelines, weights)
        self.batches = ResidentBatches(tables, self.runner.read_by_attention)
        self.steps = DecodeSteps(
            self.pool,
            max(plan.rows),
            model.num_query_heads,
            [self.scale] * model.num_layers,
            pipeline,
            self.records,
        )
        self.requests: dict[str, Request] = {}
        self.num_joined = self.num_outsiders = 0
        self.moved: Counter[str] = Counter()
        self._former: dict[str, Tensor] = {}

    @property
    def records(self) -> bool:
        """Whether the policy looks at queries."""
        return self.pipeline.needs.window_size > 0

    def join(self) -> None:
        """Adds a request whose prompt has been read."""
        num_tokens = self.draw.randrange(1, self.plan.longest)
        blocks = self._take(num_tokens // self.plan.block_size + 1)
        self.requests[f"r{self.num_joined}"] = Request(num_tokens, blocks)
        self.num_joined += 1

    def leave(self, name: str) -> None:
        """Ends a request, and frees its blocks."""
        request = self.requests.pop(name)
        self.free += [block for block in request.blocks + request.kept_blocks if block]
        self.runner.tables.release(name)
        self.windows.release(name)

    def compress(self, name: str) -> None:
        """Compresses a request for the first time, and frees its full blocks."""
        request, size = self.requests[name], self.plan.block_size
        num_full = request.num_tokens // size
        if request.kept_blocks or num_full < 4:
            return
        request.kept_blocks, request.queries = self._take(num_full // 2), []
        event_plan = EventPlan(
            request_id=name,
            group=0,
            policy=self.pipeline.name,
            trigger="prompt",
            position=request.num_tokens,
            window_size=min(request.num_tokens, self.pipeline.needs.window_size),
            first_block=0,
            end_block=num_full,
            resident_blocks=0,
            fresh_block_ids=tuple(request.kept_blocks),
        )
        self._observe(event_plan)
        row = upload(np.array(request.blocks, dtype=np.int32), self.device)
        event = self.runner.begin(event_plan, row)
        (batch,) = self.runner.batches([event])
        for layer in range(self.pool.num_layers):
            self.runner.run_layer(batch, layer, self.scale)
        self.runner.finish(event)
        self.free += request.blocks[:num_full]
        request.blocks[:num_full] = [0] * num_full

    def _observe(self, event: EventPlan) -> None:
        """Random queries of the event's window."""
        if event.window_size:
            seen = Observation(0, event.position - event.window_size, event.window_size)
            where = self.windows.locate([(event.request_id, 0, seen)])
            for layer in range(self.pool.num_layers):
                shape = (event.window_size, *self.steps.like.shape[1:])
                self.windows.record(layer, self.random_numbers(*shape), where)

    def _take(self, number: int) -> list[int]:
        """Blocks that hold random numbers, whatever was in them."""
        blocks = [self.free.pop(self.draw.randrange(len(self.free))) for _ in range(number)]
        for block in blocks:
            start = block * self.pool.pages_per_block
            self.pool.pages[start : start + self.pool.pages_per_block].normal_()
        return blocks

    def random_numbers(self, *shape: int) -> Tensor:
        """Numbers of the pages' type."""
        return torch.randn(*shape, device=self.device).to(self.pool.pages.dtype)

    def fill_for_capture(self, num_rows: int) -> None:
        """Fills buffers with padding rows, which is what vLLM captures with."""
        lengths = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        table = torch.zeros((num_rows, 1), dtype=torch.int32, device=self.device)
        self.steps.fill([], lengths, table, None)

    def advance(self, names: list[str], num_rows: int) -> tuple[list[ResidentBatch], list[str]]:
        """One more token for each, and the buffers filled for a step of so many rows.

        Returns:
            The compressed requests, and those whose queries are remembered.
        """
        size = self.plan.block_size
        for name in names:
            request = self.requests[name]
            request.num_tokens += 1
            if request.num_tokens > len(request.blocks) * size:
                request.blocks += self._take(1)
        width = max(len(self.requests[name].blocks) for name in names)
        lengths = np.zeros(num_rows, dtype=np.int32)
        table = np.zeros((num_rows, width), dtype=np.int32)
        for row, name in enumerate(names):
            request = self.requests[name]
            lengths[row] = request.num_tokens
            table[row, : len(request.blocks)] = request.blocks
        seq_lens, block_table = upload(lengths, self.device), upload(table, self.device)
        self.runner.tables.poll()
        batches = self.batches.read(names, lengths[: len(names)], seq_lens, block_table)
        observed = [name for name in names if self.records and int(name[1:]) % 3 != 2]
        seen = None if not observed else self._destinations(names, observed)
        self._retire("block table", block_table)
        for number, batch in enumerate(batches):
            self._retire(f"page table {number}", batch.page_table)
        self.steps.fill(batches, seq_lens, block_table, seen)
        return batches, observed

    def _destinations(self, names: list[str], observed: list[str]) -> Any:
        """Where the queries of some requests go, once others have taken ring buffers before."""
        for _ in range(OUTSIDERS):
            name, self.num_outsiders = f"outsider {self.num_outsiders}", self.num_outsiders + 1
            self.windows.addresses([(name, 0, Observation(0, 0, 1))], self.steps.like)
        rows = [
            (name, names.index(name), Observation(0, self.requests[name].num_tokens - 1, 1))
            for name in observed
        ]
        seen = self.windows.addresses(rows, self.steps.like)
        assert self.windows.buffers is not None
        self.moved["ring buffers"] += self.windows.buffers is not self._former.get("rings")
        self._former["rings"] = self.windows.buffers
        return seen

    def _retire(self, name: str, table: Tensor) -> None:
        """Overwrites what a table was before with block or page 0, once it lies elsewhere."""
        former = self._former.get(name)
        if former is not None and _memory(former) != _memory(table):
            self.moved[name.rstrip(" 01")] += 1
            former.zero_()
        self._former[name] = table

    def expected(
        self, layer: int, names: list[str], batches: list[ResidentBatch], queries: Tensor
    ) -> Tensor:
        """[rows, num_query_heads, head_size] attention in torch over the pages, 0 for padding."""
        pool, outputs = self.pool, torch.zeros_like(queries)
        by_head = (-1, self.plan.model.group, pool.head_size)
        compressed = [row for batch in batches for row in batch.rows.tolist()]
        for batch in batches:
            entries = pool.entries(*batch.layers[layer])
            state = batch.policy_state
            carried = None if state is None else state.layers[layer]
            rows = queries[batch.device_rows].reshape(by_head)
            bias = carried if self.pipeline.weighs_entries else None
            attended, lse = twin(decode_attention)(entries, rows, self.scale, bias, True)
            if self.pipeline.corrects:
                several = (attended[:, :, None], lse[..., None], rows[:, :, None])
                twin(correct_with_moments)(carried, *several, self.scale)
            outputs[batch.device_rows] = attended.view(-1, *queries.shape[1:])
        others = [row for row in range(len(names)) if row not in compressed]
        if others:
            table, lengths = self._uncompressed(layer, [names[row] for row in others])
            rows = queries[others].reshape(by_head)
            attended = twin(decode_attention)(pool.entries(table, lengths), rows, self.scale)[0]
            outputs[others] = attended.view(-1, *queries.shape[1:])
        return outputs

    def _uncompressed(self, layer: int, names: list[str]) -> tuple[Tensor, Tensor]:
        """[S, width] int32 pages of uncompressed requests' heads, and [S] int32 their tokens."""
        requests = [self.requests[name] for name in names]
        blocks = np.zeros((len(names), max(len(each.blocks) for each in requests)), dtype=np.int64)
        for row, request in enumerate(requests):
            blocks[row, : len(request.blocks)] = request.blocks
        pages = self.pool.layer_page_ids(layer, upload(blocks.ravel(), self.device))
        table = pages.unflatten(1, blocks.shape).transpose(0, 1).flatten(0, 1)
        lengths = np.array([each.num_tokens for each in requests], dtype=np.int32)
        by_head = np.repeat(lengths, self.pool.num_heads)
        return table.int(), upload(by_head, self.device)

    def num_forgotten(self, name: str) -> int:
        """In how many layers the last queries of a request are not those that were computed."""
        request = self.requests[name]
        queries = request.queries[-self.windows.window_size :]
        where = self.windows.find([(name, request.num_tokens)], len(queries))
        layers = range(self.pool.num_layers)
        remembered = [self.windows.read(layer, where)[:, 0] for layer in layers]
        computed = torch.stack(queries).unbind(1)
        return sum(not torch.equal(*pair) for pair in zip(remembered, computed, strict=True))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def run_eagerly(work: Work) -> Work:
    """Returns the work itself, without a graph."""
    return work


@torch.inference_mode()
def check_steps(plan: CapturePlan, capture: Callable[[Work], Work], fills: bool = True) -> Row:
    """Captures a step of every size, then replays these while requests come and go.

    Args:
        plan: what.
        capture: takes a step of all layers, and returns what replays it.
        fills: False: replays read what the first round has left, for a test of this check.

    Returns:
        The largest error of an output, in how many layers queries were not remembered, and how
        often which memory had moved.
    """
    torch.manual_seed(0)
    traffic = Traffic(plan)
    shape = (plan.num_layers, max(plan.rows), *traffic.steps.like.shape[1:])
    queries, outputs = traffic.random_numbers(*shape), traffic.random_numbers(*shape)
    replays = {}
    for size in sorted(plan.rows, reverse=True):
        traffic.fill_for_capture(size)

        def step(size: int = size) -> None:
            for layer in range(plan.num_layers):
                traffic.steps.run(layer, queries[layer, :size], outputs[layer, :size])

        replays[size] = capture(step)
    for _ in range(max(plan.rows) // 2):
        traffic.join()
    error, forgotten, compressed = 0.0, 0, 0
    for number in range(plan.rounds):
        size = plan.rows[number % len(plan.rows)]
        names = list(traffic.requests)[:size]
        batches, observed = traffic.advance(names, size)
        if not fills and number >= len(plan.rows):
            traffic.fill_for_capture(size)
        queries.copy_(traffic.random_numbers(*shape))
        outputs.fill_(torch.nan)
        replays[size]()
        for layer in range(plan.num_layers):
            wanted = traffic.expected(layer, names, batches, queries[layer, :size])
            error = max(error, largest_error(outputs[layer, :size], wanted))
        for name in observed:
            traffic.requests[name].queries.append(queries[:, names.index(name)].clone())
            forgotten += traffic.num_forgotten(name)
        compressed += sum(len(batch.rows) for batch in batches)
        _change(traffic, number)
    return {
        "policy": plan.policy,
        "rows": list(plan.rows),
        "layers": plan.num_layers,
        "rounds": plan.rounds,
        "error": error,
        "forgotten": forgotten,
        "compressed": compressed,
        "moved": dict(traffic.moved),
        "passed": error <= TOLERANCES[plan.model.dtype] and forgotten == 0,
    }


def _change(traffic: Traffic, number: int) -> None:
    """Between two steps: one request is compressed, one joins, and now and then one leaves."""
    names = list(traffic.requests)
    traffic.compress(names[number % len(names)])
    if number % 4 == 3:
        traffic.leave(names[number // 4 % len(names)])
    if len(traffic.requests) < max(traffic.plan.rows):
        traffic.join()


def measure_capture(
    plan: CapturePlan, policies: Sequence[str], folder: Path, limit_seconds: float
) -> list[Row]:
    """Checks every policy in both modes, each mode in a process of its own that a fault may end.

    Args:
        plan: of each policy; its `policy` does not count.
        policies: which.
        folder: takes what the processes print, and their results.
        limit_seconds: of both processes together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for mode in MODES:
        written, log = folder / f"capture-{mode}.json", folder / f"capture-{mode}.log"
        written.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gpu_parts.capture", "--mode", mode, "--out", str(written)]
        command += ["--plan", json.dumps(asdict(plan)), "--policies", *policies]
        paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if mode == "eager":
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        with log.open("w") as output:
            try:
                code: object = subprocess.run(
                    command,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit_seconds / len(MODES),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"its {limit_seconds / len(MODES):.0f} s being over"
        done = json.loads(written.read_text()) if written.exists() else []
        rows += [{"mode": mode, **row} for row in done]
        if len(done) < len(policies):
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            reason = f"ended with {code}: {last}"
            rows.append({"mode": mode, "policy": policies[len(done)], "refused": reason})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks one mode, and writes a row after each policy, which says whether it passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--plan", type=json.loads, default={}, help="fields of CapturePlan")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    fields = {**options.plan, "rows": tuple(options.plan.get("rows", CapturePlan.rows))}
    capture = capture_graph if options.mode == "graph" else run_eagerly
    rows = []
    for policy in options.policies:
        rows.append(check_steps(CapturePlan(**{**fields, "policy": policy}), capture))
        options.out.write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
