"""MomentKV (arXiv 2606.01563): directions of what is evicted, and what the expansion leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attention_parts import (
    estimate_cosine,
    gap_cosine,
    relative_error,
)
from claim_parts.bounds import expansion_remainders
from claim_parts.look import Look
from vllm_kvcompress.kernels.merging.moments import split_moments

NUM_KEPT = 128  # tokens per head, the paper's smallest budget


def momentkv(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Figures 2 and 3: directions of what is kept, evicted and estimated, and what they cost."""
    for policy in ("snapkv+momentfix", "momentkv"):
        for budget in (0.1, 0.25):
            yield from corrections(look, policy, budget, f"{policy}@{budget:g}")


def regime(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Figure 2 and Table 3 with as many tokens as the paper keeps; moments take no room."""
    budget = NUM_KEPT / look.num_tokens
    for policy in ("snapkv+momentfix", "momentkv"):
        for order in (0, 1):
            name = f"{policy}, order {order}@{NUM_KEPT}"
            yield from corrections(look, policy, budget, name, order=order)


def corrections(
    look: Look, policy: str, budget: float, name: str, **params: Any
) -> Iterator[tuple[str, Tensor]]:
    """Directions with one policy, and the error of outputs without and with its correction."""
    kept = look.kept(policy, budget, **params)
    outputs, parts = look.outputs(kept)
    yield f"gap/{name}", gap_cosine(parts).mean(dim=0)
    if params.get("order", 1):
        cosine = estimate_cosine(parts, look.queries(), look.moments(kept))
        yield f"estimate/{name}", cosine.mean(dim=0)
    yield f"evicted-mass/{name}", (1 - parts.mass).mean(dim=0)
    plain, mended = (relative_error(some, parts) for some in (parts.kept, outputs))
    yield f"error-plain/{name}", plain.mean(dim=0)
    yield f"error-corrected/{name}", mended.mean(dim=0)
    yield f"better/{name}", (mended < plain).float().mean(dim=0)


def expansion(look: Look) -> Iterator[tuple[str, Tensor]]:
    """What bounds of MomentKV's error rest on: how far evicted tokens' logits are from their mean.

    With delta_j the distance, Z the mean of exp(delta) and the mean value v: the estimate leaves
    out E[(exp(delta) / Z - 1 - delta) (v_j - v)], and takes ln Z for 0 in the evicted mass.
    """
    tiny = torch.finfo(torch.float32).tiny
    groups = (len(look.layer.keys), -1)
    grouped = look.queries().unflatten(1, groups).permute(1, 2, 0, 3)
    for budget in (0.1, 0.25):
        kept, name = look.kept("momentkv", budget), f"momentkv@{budget:g}"
        evicted = ~kept.mask[:, None, None]
        count, mean_key, mean_value, cross = split_moments(
            look.moments(kept), look.layer.keys.shape[2]
        )
        keys, values = (rows[:, : look.num_tokens] for rows in (look.layer.keys, look.layer.values))
        away = grouped @ (keys - mean_key[:, None]).mT[:, None]
        away = away.masked_fill(~evicted, 0)
        weights = away.exp().masked_fill(~evicted, 0)
        some, count = count[:, None, None, None] > 0, count.clamp_min(1)[:, None, None, None]
        mean_weights = torch.where(some, weights.sum(dim=3, keepdim=True) / count, 1)
        left_out = (weights / mean_weights - 1 - away).masked_fill(~evicted, 0)
        spread = (away.square().sum(dim=3) / count[..., 0]).sqrt()
        widest = (values - mean_value[:, None]).norm(dim=2).masked_fill(kept.mask, 0)
        bound = widest.amax(dim=1)[:, None, None] * left_out.abs().sum(dim=3) / count[..., 0]
        first = torch.einsum("hgmd,hed->hgme", grouped, cross) / count
        true = (weights / mean_weights / count) @ values[:, None]
        size = true.norm(dim=3).clamp_min(tiny)
        errors = {
            order: (true - mean_value[:, None, None] - step).norm(dim=3)
            for order, step in (("zeroth", torch.zeros_like(first)), ("first", first))
        }
        for order, error in errors.items():
            yield f"expansion-{order}/{name}", (error / size).mean(dim=2).flatten()
        yield f"expansion-spread/{name}", spread.mean(dim=2).flatten()
        yield f"expansion-farthest/{name}", away.abs().amax(dim=3).mean(dim=2).flatten()
        yield f"expansion-log-mass/{name}", mean_weights.log().mean(dim=(2, 3)).flatten()
        yield (
            f"expansion-of-bound/{name}",
            (errors["first"] / bound.clamp_min(tiny)).mean(dim=2).flatten(),
        )


def equations(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Eq. 29 to 35 as printed, in fp64: what each says of evicted tokens, and what is.

    d_j is a logit's distance from the mean of the E evicted ones, s the largest one, f their exact
    output and g the estimate. Figures of a head are medians over queries, since most are skewed.
    """
    kept = look.kept("momentkv", 0.25)
    layer, evicted = look.layer, ~kept.mask[:, None, None]
    keys, values = (rows[:, : look.num_tokens].double() for rows in (layer.keys, layer.values))
    count = evicted.sum(dim=3)
    hidden = ~evicted[:, 0, 0, :, None]
    mean_key, mean_value = (
        rows.masked_fill(hidden, 0).sum(dim=1, keepdim=True) / count[:, 0, :, None]
        for rows in (keys, values)
    )
    queries = look.queries().double().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    away = (queries @ (keys - mean_key).mT[:, None]).masked_fill(~evicted, 0)
    weights = away.exp().masked_fill(~evicted, 0)
    normaliser = weights.sum(dim=3) / count  # Z_E / Zh, Eq. 32
    exact = weights @ values[:, None] / weights.sum(dim=3, keepdim=True)
    estimate = mean_value[:, None] + away @ (values - mean_value)[:, None] / count[..., None]
    error, largest = (exact - estimate).norm(dim=3), away.abs().amax(dim=3)
    widest = values.norm(dim=2).masked_fill(hidden[..., 0], 0).amax(dim=1)[:, None, None]
    bound = largest**2 * largest.exp() * (widest + estimate.norm(dim=3)) / 2  # Eq. 29
    second = 1 + away.square().sum(dim=3) / (2 * count)  # Eq. 32 and 33
    lse = look.parts(kept.mask).lse.double().unflatten(1, (len(keys), -1)).movedim(0, 2)
    ratio = (lse - (queries @ mean_key.mT[:, None])[..., 0] - count.log()).exp()  # Z_R / Zh
    true, taken = ratio / (ratio + normaliser), ratio / (ratio + 1)
    excess = normaliser - 1
    printed = true * (1 - taken) * excess / (1 + excess * (1 - taken))  # Eq. 35
    figures = {
        "eq29-error-of-bound": error / bound,
        "eq29-bound-over-output": bound / exact.norm(dim=3),
        "eq32-normaliser": normaliser,
        "eq33-normaliser": second,
        "eq35-overweight": taken - true,
        "eq35-printed-of-true": printed / (taken - true).clamp_min(1e-30),
        "eq35-corrected-of-true": true * (1 - taken) * excess / (taken - true).clamp_min(1e-30),
    }
    for name, figure in figures.items():
        yield f"{name}/momentkv@0.25", figure.median(dim=2).values.flatten().float()


def remainders(look: Look) -> Iterator[tuple[str, Tensor]]:
    """The bounds that a first-order expansion must have, against what it leaves out."""
    tiny = torch.finfo(torch.float32).tiny
    rows = (look.layer.keys[:, : look.num_tokens], look.layer.values[:, : look.num_tokens])
    for budget in (0.1, 0.25):
        mask, name = look.kept("momentkv", budget).mask, f"momentkv@{budget:g}"
        parts = look.parts(mask)
        relative = expansion_remainders(look.queries(), *rows, ~mask, parts)
        for kind in ("numerator", "normaliser", "output"):
            error, bound = getattr(relative, kind), getattr(relative, f"{kind}_bound")
            share = error / bound.clamp_min(tiny)
            yield f"remainder-{kind}-of-bound/{name}", share.mean(dim=2).flatten().float()
        size = parts.full.norm(dim=2).unflatten(1, relative.output.shape[:2]).movedim(0, 2)
        yield f"remainder-error/{name}", (relative.output / size).mean(dim=2).flatten().float()
        bound = (relative.output_bound / size).float()
        yield f"remainder-bound/{name}", bound.median(dim=2).values.flatten()
        yield f"remainder-below-output/{name}", (bound < 1).float().mean(dim=2).flatten()
