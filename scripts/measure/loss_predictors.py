"""Asks whether a prompt tells its own loss, and how much memory budgets by prompt would save.

    python scripts/measure/loss_predictors.py models/smollm2 --out rows.jsonl --figures figures.json

Reads the texts of `vllm-kvcompress calibrate` without an engine, evicted tokens masked, and writes
a row per text: at each budget of `auto` what its continuation loses, and `PREDICTORS`, which need
the prompt alone. Then gives every text the smallest budget whose predicted loss is below a
threshold: the highest at which one half of the texts keeps a limit with 95% confidence, as
`calibrate` chooses one budget for all. The other half says what that keeps, and whether the limit
holds. Few texts promise nothing, so texts that calibrate are drawn again until they are 116. Beside
losses the same is asked of KL divergences, whose part that is luck is smaller. Runs go on where
they stopped; where no text is missing, rows are only evaluated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offline.dense import DenseLayer, Kept
from offline.masked import MaskedModel
from offline.rows import Row, append_rows, read_rows
from stand_in import keeps
from vllm_kvcompress.config.auto import AUTO, named_policy, profile_beside
from vllm_kvcompress.policies.base import Merged
from vllm_kvcompress.policies.headkv import read_importance
from vllm_kvcompress.tools.calibration.bounds import upper_bound
from vllm_kvcompress.tools.calibration.measure import own_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt

BUDGETS = (0.5, 0.25, 0.1)
NUM_LAST = 64  # last queries whose attention is compared, and last tokens predicted again
NUM_HELD_OUT = 128  # last tokens that the prompt before them, compressed, predicts
CAP = 0.5  # nats per token, as in `calibrate`
LIMITS = (0.02, 0.03, 0.05)  # promised, in nats per token
THRESHOLDS = np.geomspace(0.001, 0.3, 60)
NUM_HALVES, NUM_RESAMPLES = 40, 1000
NUM_CALIBRATING = 116  # texts drawn from the half that calibrates, as many as `calibrate` has
ONE_FOR_ALL = "one budget for all"
AT_RANDOM = "at random"
ITSELF = "the loss itself"  # what no predictor can do better than
ALL = "all of them"
PREDICTORS = (
    "evicted attention",
    "evicted attention, measured heads",
    "change of outputs",
    "change of outputs, measured heads",
    "predicted again",
    "predicted again, divergence",
    "held out",
    "held out, divergence",
    "loss of the prompt itself",
)


def setup_of(model: str, budget: float) -> str:
    """Names what `auto` stands for at a budget, as `stand_in.py` does."""
    profile = profile_beside(model)
    policy = named_policy(AUTO, profile is not None, budget)
    return f"{policy}:profile={profile}@{budget}" if profile else f"{policy}@{budget}"


def nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """[m - 1] of all tokens but the first, by the logits behind those before them."""
    logits = logits[: len(tokens) - 1].float()
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")


def divergence(full: Tensor, compressed: Tensor) -> float:
    """Mean KL divergence of the predictions of two caches, [m, vocabulary] logits each."""
    full, compressed = full.float().log_softmax(dim=1), compressed.log_softmax(dim=1)
    return float((full.exp() * (full - compressed)).sum(dim=1).mean())


def attention_change(layer: DenseLayer, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[H * G] each, mean over the last queries: evicted attention, and |o - o_full| / |o_full|.

    Args:
        layer: attention over the prompt.
        mask: [H, n] bool, kept tokens.
    """
    queries = layer.queries[-NUM_LAST:].transpose(0, 1).unflatten(0, (len(layer.keys), -1))
    logits = layer.scale * queries @ layer.keys[:, None].mT
    count, num_tokens = logits.shape[2:]
    logits += torch.full((count, num_tokens), float("-inf")).triu(1 + num_tokens - count)
    evicted, values = ~mask[:, None, None], layer.values[:, None]
    weights = logits.softmax(dim=-1)
    left = logits.masked_fill(evicted, float("-inf")).softmax(dim=-1).nan_to_num()
    full = weights @ values
    change = (left @ values - full).norm(dim=-1) / full.norm(dim=-1)
    return (weights * evicted).sum(dim=-1).mean(dim=-1).flatten(), change.mean(dim=-1).flatten()


class Text:
    """A text that has been read once; what it loses, and what its prompt tells, at any setting.

    Args:
        model: reads it.
        tokens: of the prompt, and of what follows.
        importance: [layers, H * G] of measured heads.
    """

    def __init__(
        self, model: MaskedModel, tokens: tuple[list[int], list[int]], importance: Tensor
    ) -> None:
        self._model, self._importance = model, importance
        self._prompt, self._rest = torch.tensor(tokens[0]), torch.tensor(tokens[1])
        self._context, logits = model.read(tokens[0], len(tokens[0]))
        self._own = nats(logits, self._prompt)
        self._own_logits = logits[-NUM_HELD_OUT:-1].clone()
        self._full_logits = model.logits(self._context, None, self._rest[:-1])
        self._full = nats(self._full_logits, self._rest)

    def figures(self, setup: str) -> dict[str, float]:
        """The loss of what follows, of its halves too, its divergence, and `PREDICTORS`."""
        kept = keeps(setup, self._context)
        assert kept is not None
        logits = self._model.logits(self._context, kept, self._rest[:-1])
        lost = nats(logits, self._rest) - self._full
        layers = zip(self._context, kept, strict=True)
        changes = [attention_change(layer, each.mask) for layer, each in layers]
        evicted, change = (torch.stack(each) for each in zip(*changes, strict=True))
        share = self._importance / self._importance.sum()
        num_before = len(self._prompt) - NUM_HELD_OUT
        held_out = keeps(setup, [layer.first(num_before) for layer in self._context])
        half = len(lost) // 2
        values = (
            *(evicted.mean(), (evicted * share).sum(), change.mean(), (change * share).sum()),
            *self._predicted(NUM_LAST, kept),
            *self._predicted(NUM_HELD_OUT, held_out),
            self._own.mean(),
        )
        figures = dict(zip(PREDICTORS, values, strict=True)) | {
            "loss": lost.mean(),
            "first half": lost[:half].mean(),
            "second half": lost[half:].mean(),
            "divergence": divergence(self._full_logits, logits),
            "kept": torch.stack([each.mask for each in kept]).float().mean(),
        }
        return {name: round(float(value), 5) for name, value in figures.items()}

    def _predicted(self, num_last: int, kept: list[Kept] | None) -> tuple[Tensor, float]:
        """Loss and divergence of the prompt's last tokens behind what is kept of those before."""
        begin = len(self._prompt) - num_last
        before, last = [layer.first(begin) for layer in self._context], self._prompt[begin:]
        assert kept is not None
        assert all(each.merged.keys is None for each in kept), "expected a policy that only evicts"
        some = [Kept(each.mask[:, :begin], Merged()) for each in kept]
        logits = self._model.logits(before, some, last[:-1])
        lost = (nats(logits, last) - self._own[begin:]).mean()
        return lost, divergence(self._own_logits[1 - num_last :], logits)


def measured(options: argparse.Namespace) -> list[Row]:
    """Reads the texts that the file of rows lacks; returns a row for each."""
    from tqdm import tqdm

    rows, tokenizer = read_rows(options.out), load_tokenizer(options.model)
    items = own_texts([options.length], options.continuation, options.samples, tokenizer)
    items = items[: options.texts]
    done = {row["item"] for row in rows}
    missing = [number for number in range(len(items)) if number not in done]
    if not missing:
        return rows
    model, profile = MaskedModel(options.model, torch.float32), profile_beside(options.model)
    importance = torch.tensor(read_importance(Path(profile))) if profile else torch.ones(1)
    for number in tqdm(missing, unit="text"):
        text = Text(model, split_prompt(tokenizer, items[number]), importance)
        figures = [text.figures(setup_of(options.model, budget)) for budget in BUDGETS]
        by_name = {name: [each[name] for each in figures] for name in figures[0]}
        rows.append({"item": number, "kind": items[number].task, **by_name})
        append_rows(options.out, rows[-1:])
    return rows


def ranks(values: np.ndarray) -> np.ndarray:
    """The place of each value among all of them."""
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


def spearman(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Rank correlation of [n] each, and its 95% interval from texts drawn again."""

    def correlation(drawn: Any) -> float:
        return float(np.corrcoef(ranks(one[drawn]), ranks(other[drawn]))[0, 1])

    rng, count = np.random.default_rng(0), len(one)
    resampled = [correlation(rng.integers(0, count, count)) for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"rho": correlation(slice(None)), "low": float(low), "high": float(high)}


def left_out_fit(columns: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """[n] the loss of each text that the least squares of all other texts predict.

    Args:
        columns: [n, k] predictors.
        losses: [n] capped.
    """
    columns = np.column_stack([np.ones(len(losses)), columns])
    hat = columns @ np.linalg.pinv(columns)
    predicted: np.ndarray = losses - (losses - hat @ losses) / (1 - np.diag(hat))
    return predicted


@dataclass(frozen=True)
class Losses:
    """What texts lose and keep.

    Attributes:
        losses: [n, 1 + budgets], capped; nothing in the first column, where everything is kept.
        kept: [1 + budgets] the part that is kept.
    """

    losses: np.ndarray
    kept: np.ndarray

    def of(self, texts: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """[len(texts)] losses at the column that `choice` [n] names for each of all texts."""
        return np.asarray(self.losses[texts, choice[texts]])


def by_threshold(predicted: np.ndarray) -> Iterator[np.ndarray]:
    """Yields a column for each text, [n]: the last down to which all predictions are small enough.

    Args:
        predicted: [n, budgets] losses, from the largest budget on.
    """
    for threshold in THRESHOLDS:
        yield np.cumprod(predicted <= threshold, axis=1).sum(axis=1)


def at_random(num_texts: int) -> Iterator[np.ndarray]:
    """Yields columns as `by_threshold` does: more and more texts, whichever, take the next one."""
    drawn = np.random.default_rng(0).random(num_texts)
    for step in np.linspace(0, len(BUDGETS), len(THRESHOLDS)):
        yield np.minimum(len(BUDGETS), int(step) + (drawn < step % 1))


def promised(
    texts: Losses, choices: Sequence[np.ndarray], halves: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[str, dict[str, float]]:
    """By limit: what the checking halves keep and lose, and in how many of them it held.

    Choices are tried in order up to the first whose bound is above the limit, so that 95% hold for
    the one that is taken, however many there are.
    """
    outcomes: dict[float, list[tuple[float, float]]] = {limit: [] for limit in LIMITS}
    for calibrating, checking in halves:
        taken, left = dict.fromkeys(LIMITS, np.zeros_like(choices[0])), list(LIMITS)
        chosen, bound = taken[LIMITS[0]][calibrating], 0.0
        for choice in choices:
            if (choice[calibrating] != chosen).any():
                chosen = choice[calibrating]
                bound = upper_bound(texts.of(calibrating, choice).tolist(), CAP)
            left = [limit for limit in left if bound <= limit]
            taken |= dict.fromkeys(left, choice)
            if not left:
                break
        for limit, choice in taken.items():
            kept, loss = texts.kept[choice[checking]].mean(), texts.of(checking, choice).mean()
            outcomes[limit].append((float(kept), float(loss)))
    return {
        f"{limit:g}": {
            "kept": float(np.mean([kept for kept, _ in some])),
            "loss": float(np.mean([loss for _, loss in some])),
            "held": float(np.mean([loss <= limit for _, loss in some])),
        }
        for limit, some in outcomes.items()
    }


def evaluated(rows: Sequence[Row], target: str = "loss") -> dict[str, Any]:
    """The figures of all texts: means, correlations, and what promises keep by which predictor.

    Args:
        rows: of texts.
        target: what is limited, "loss" or "divergence".
    """

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    losses, places = np.minimum(CAP, column(target)), range(len(BUDGETS))
    kept = np.array([1.0, *column("kept").mean(axis=0)])
    texts = Losses(np.column_stack([np.zeros(len(rows)), losses]), kept)
    rng, half = np.random.default_rng(1), len(rows) // 2
    orders = [rng.permutation(len(rows)) for _ in range(NUM_HALVES)]
    halves = [(rng.choice(order[:half], NUM_CALIBRATING), order[half:]) for order in orders]
    tables = {name: column(name)[:, :, None] for name in PREDICTORS}
    tables[ALL] = np.concatenate(list(tables.values()), axis=2)
    ways = {
        ONE_FOR_ALL: [np.full(len(rows), place) for place in range(1 + len(BUDGETS))],
        AT_RANDOM: list(at_random(len(rows))),
    }
    correlations: dict[str, dict[str, dict[str, float]]] = {}
    for name, table in tables.items():
        fits = [left_out_fit(table[:, place], losses[:, place]) for place in places]
        ways[name] = list(by_threshold(np.stack(fits, axis=1)))
        told = np.stack(fits, axis=1) if name == ALL else table[:, :, 0]
        correlations[name] = _by_budget(told, column(target))
    ways[ITSELF] = list(by_threshold(losses))
    correlations["halves of what follows"] = _by_budget(column("first half"), column("second half"))
    return {
        "texts": len(rows),
        "mean loss": {f"{BUDGETS[at]:g}": float(losses[:, at].mean()) for at in places},
        "spearman": correlations,
        "promises": {name: promised(texts, choices, halves) for name, choices in ways.items()},
    }


def _by_budget(one: np.ndarray, other: np.ndarray) -> dict[str, dict[str, float]]:
    """`spearman` of each column."""
    pairs = zip(BUDGETS, one.T, other.T, strict=True)
    return {f"{budget:g}": spearman(*columns) for budget, *columns in pairs}


def table(figures: dict[str, Any]) -> Iterator[str]:
    """Correlations by budget, then what promises keep, by limit, and how many held."""
    yield f"| predictor, {figures['texts']} texts | {' | '.join(map(str, BUDGETS))} |"
    yield "|---" * (1 + len(BUDGETS)) + "|"
    for name, by_budget in figures["spearman"].items():
        cells = [f"{v['rho']:.2f} ({v['low']:.2f} to {v['high']:.2f})" for v in by_budget.values()]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield f"| budget by | {' | '.join(f'loss:{limit:g}' for limit in LIMITS)} |"
    yield "|---" * (1 + len(LIMITS)) + "|"
    for name, by_limit in figures["promises"].items():
        cells = [f"{v['kept']:.3f} ({v['held']:.0%})" for v in by_limit.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--length", type=int, default=1024, help="tokens of prompts (1024)")
    parser.add_argument("--continuation", type=int, default=128, help="what follows (128)")
    parser.add_argument("--samples", type=int, default=80, help="texts of each kind at most (80)")
    parser.add_argument("--texts", type=int, help="the first of them (all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="rows")
    parser.add_argument("--figures", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args()
    rows = measured(options)
    figures = {target: evaluated(rows, target) for target in ("loss", "divergence")}
    options.figures.write_text(json.dumps(figures, indent=1) + "\n")
    for target, some in figures.items():
        print(f"\n{target}\n\n" + "\n".join(table(some)))


if __name__ == "__main__":
    main()
