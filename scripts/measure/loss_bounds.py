#!/usr/bin/env python3
"""Asks how often upper bounds of a mean loss are wrong, and how far they are above it.

    python scripts/measure/loss_bounds.py [--losses CALIBRATION.json ...] --out bounds.json

Draws texts from distributions whose mean is known: losses as simulations have them, and those of
calibrations, drawn again. Bounds are 95% ones: the betting bound that `vllm-kvcompress calibrate`
takes, Hoeffding and Bentkus (arXiv 2110.01052), Student's t, and the bootstrap of t.

Of calibrations it also says how often promises are kept: on halves of their texts drawn at random,
and on a kind of text that was left out, by the bound, and by the mean loss alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_kvcompress.tools.calibration.bounds import upper_bound
from vllm_kvcompress.tools.calibration.record import Calibration, TextLosses, smallest_budget

ERROR = 0.05
COUNTS = (40, 150, 300)  # texts
RESAMPLES = 400
LIMITS = (0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12, 0.15, 0.2)  # promised, in nats per token
NUM_HALVES = 200
QUANTILE = 1.645  # of the normal distribution

Draw = Callable[[int], np.ndarray]


def betting(losses: np.ndarray) -> float:
    return upper_bound(losses.tolist(), 1.0)


def hoeffding_bentkus(losses: np.ndarray) -> float:
    """The smallest mean that both inequalities together refute, by bisection."""
    own, count = float(losses.clip(0, 1).mean()), len(losses)

    def refuted(mean: float) -> bool:
        entropy = (1 - own) * math.log((1 - own) / (1 - mean))
        entropy += own * math.log(own / mean) if own > 0 else 0.0
        seen = math.ceil(count * own - 1e-9)
        logs = [_log_binomial(count, k, mean) for k in range(seen + 1)]
        return min(math.exp(-count * entropy), math.e * sum(map(math.exp, logs))) <= ERROR

    low, high = own, 1 - 1e-9
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def _log_binomial(count: int, k: int, share: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return ways + k * math.log(share) + (count - k) * math.log(1 - share)


def student_t(losses: np.ndarray) -> float:
    quantile = QUANTILE + (QUANTILE**3 + QUANTILE) / (4 * (len(losses) - 1))
    return float(losses.mean() + quantile * losses.std(ddof=1) / math.sqrt(len(losses)))


def bootstrap_t(losses: np.ndarray) -> float:
    rng, count = np.random.default_rng(0), len(losses)
    drawn = losses[rng.integers(0, count, (RESAMPLES, count))]
    errors = np.maximum(drawn.std(axis=1, ddof=1), 1e-9) / math.sqrt(count)
    low = np.quantile((drawn.mean(axis=1) - losses.mean()) / errors, ERROR)
    return float(losses.mean() - low * losses.std(ddof=1) / math.sqrt(count))


BOUNDS = {
    "betting": betting,
    "Hoeffding-Bentkus": hoeffding_bentkus,
    "bootstrap-t": bootstrap_t,
    "Student's t": student_t,
}


def simulated(rng: np.random.Generator) -> dict[str, Draw]:
    """Losses of at most 1, about 0.02 in the mean."""

    def heavy(count: int) -> np.ndarray:
        return np.minimum(1, 0.02 * rng.lognormal(-1.125, 1.5, count))

    def rare(count: int) -> np.ndarray:
        return np.where(rng.random(count) < 0.01, 1.0, 0.02 * rng.random(count))

    def noisy(count: int) -> np.ndarray:
        return 0.02 * rng.lognormal(-0.5, 1, count) + rng.normal(0, 0.02, count)

    def kinds(count: int) -> np.ndarray:
        return rng.choice([0.002, 0.01, 0.02, 0.048], count) * rng.lognormal(-0.5, 1, count)

    return {"heavy tail": heavy, "one in a hundred": rare, "gains, too": noisy, "kinds": kinds}


def measured(path: Path, rng: np.random.Generator) -> dict[str, Draw]:
    """The losses of a calibration's texts at each budget, drawn with replacement."""
    calibration = Calibration.read(path)

    def of(place: int) -> Draw:
        losses = np.minimum(1, [text.losses[place] for text in calibration.texts])
        return lambda count: rng.choice(losses, count)

    names = [f"{calibration.policy}@{budget:g}" for budget in calibration.budgets]
    return {name: of(place) for place, name in enumerate(names)}


def compared(draw: Draw, num_trials: int) -> dict[str, dict[str, float]]:
    """By bound and number of texts: how often it is below the mean, and its mean."""
    mean = float(np.mean([draw(10_000).mean() for _ in range(40)]))
    figures: dict[str, dict[str, float]] = {"mean": {"mean": mean}}
    for count in COUNTS:
        samples = [draw(count) for _ in range(num_trials)]
        for name, bound in BOUNDS.items():
            found = np.array([bound(sample) for sample in samples])
            wrong = float((found < mean - 1e-3).mean())
            figures[f"{name}, {count}"] = {"wrong": wrong, "bound": float(found.mean())}
    return figures


def promises(calibration: Calibration) -> dict[str, dict[str, float]]:
    """How many promises below budget 1.0 there were, and how many of them were kept."""
    texts, rng = list(calibration.texts), random.Random(0)
    halves = []
    for _ in range(NUM_HALVES):
        rng.shuffle(texts)
        halves.append((texts[: len(texts) // 2], texts[len(texts) // 2 :]))
    kinds = [
        ([t for t in texts if t.kind != kind], [t for t in texts if t.kind == kind])
        for kind in dict.fromkeys(text.kind for text in texts)
    ]
    return {
        f"{name}, by {way}": kept(calibration, pairs, way == "bound")
        for name, pairs in (("halves", halves), ("kinds left out", kinds))
        for way in ("bound", "mean")
    }


def kept(
    calibration: Calibration,
    pairs: list[tuple[list[TextLosses], list[TextLosses]]],
    by_bound: bool,
) -> dict[str, float]:
    """Chooses budgets by the first texts of each pair, and looks whether the others keep to it."""
    promised = num_kept = 0
    for calibrating, checking in pairs:
        figures, means = [], {}
        for place, budget in enumerate(calibration.budgets):
            losses = [text.losses[place] for text in calibrating]
            bound = upper_bound(losses, calibration.cap) if by_bound else float(np.mean(losses))
            figures.append((budget, bound))
            means[budget] = float(np.mean([text.losses[place] for text in checking]))
        for limit in LIMITS:
            budget = smallest_budget(figures, limit)
            promised += budget < 1
            num_kept += budget < 1 and means[budget] <= limit
    return {"promised": promised, "kept": num_kept}


def main() -> None:
    """Compares the bounds, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--losses", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    draws = simulated(rng)
    for path in arguments.losses:
        draws |= measured(path, rng)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for path in arguments.losses:
        calibration = Calibration.read(path)
        figures[f"promises of {calibration.policy}"] = promises(calibration)
        print(f"promises of {calibration.policy}:", figures[f"promises of {calibration.policy}"])
    for name, draw in draws.items():
        figures[name] = compared(draw, arguments.trials)
        cells = [f"{v['wrong']:.3f} {v['bound']:.3f}" for v in list(figures[name].values())[1:]]
        print(f"{name} ({figures[name]['mean']['mean']:.4f}):", " | ".join(cells), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
