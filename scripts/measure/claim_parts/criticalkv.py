"""CriticalKV (arXiv 2502.03805): what its second stage saves, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from attention_parts import projected_error
from claim_parts.bounds import eviction_bound
from claim_parts.look import WINDOW, Look, pipeline_of
from offline.dense import DenseLayer
from offline.masked import MaskedModel

ALPHAS = (0.0, 0.25, 0.75)  # beside the paper's 0.5, which is the default
BUDGETS = (0.025, 0.05, 0.1, 0.2, 0.4)


def kept_mask(look: Look, policy: str, budget: float, **params: Any) -> Tensor:
    """[H, n] what a policy keeps, with the paper's norm unless told otherwise."""
    if "criticalkv" in policy:
        params = {"norm": "l1", **params}
    return look.kept(policy, budget, **params).mask


def lost(look: Look, mask: Tensor, observed: bool = False) -> Tensor:
    """[H * G] L1 norm of what is lost behind W_O."""
    parts = look.parts(mask, observed)
    return projected_error(parts.kept, parts, look.layer.output_weight).mean(dim=0)


def theta(look: Look, mask: Tensor) -> Tensor:
    """[H * G] Theorem 3.3's bound of that."""
    norms = value_norms(look)
    bounds = eviction_bound(look.parts(mask, values=norms.mT)).mean(dim=0)
    return bounds.unflatten(0, norms.shape[:2]).diagonal(dim1=1, dim2=2).flatten()


def value_norms(look: Look) -> Tensor:
    """[H, G, n] L1 norms of values behind W_O."""
    weight = look.layer.output_weight.unflatten(0, (len(look.layer.keys), -1))
    return (look.layer.values[:, None] @ weight).abs().sum(dim=3)


def criticalkv(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Section 4.5: the L1 norm of what is lost behind W_O, with and without `criticalkv`."""
    for base, budgets in (("snapkv", (0.1, 0.25, 0.5)), ("adakv", (0.25, 0.5))):
        for budget in budgets:
            for policy in (base, f"{base}+criticalkv"):
                mask = kept_mask(look, policy, budget)
                yield f"l1/{policy}@{budget:g}", lost(look, mask)
                if budget == 0.25:
                    yield from bounded(look, mask, f"{policy}@0.25")
    for policy in ("snapkv", "snapkv+criticalkv"):
        plain = kept_mask(look, policy, 0.25, kernel_size=1)
        yield f"l1-observed/{policy}@0.25", lost(look, kept_mask(look, policy, 0.25), True)
        yield f"l1-plain/{policy}@0.25", lost(look, plain)
        yield f"l1-plain-observed/{policy}@0.25", lost(look, plain, True)
    yield (
        "l1-epsilon-0.0/snapkv+criticalkv@0.25",
        lost(look, kept_mask(look, "snapkv+criticalkv", 0.25, epsilon=0.0)),
    )
    yield "l1-l2/snapkv+criticalkv@0.25", lost(look, l2_mask(look))
    both = [kept_mask(look, policy, 0.25) for policy in ("snapkv", "snapkv+criticalkv")]
    yield "same-tokens", (both[0] & both[1]).sum(dim=1) / both[0].sum(dim=1)
    # Without sinks, whose values are next to nothing.
    norms = value_norms(look)[..., 4 : look.num_tokens].mean(dim=1)
    yield "value-norms/variation", norms.std(dim=1) / norms.mean(dim=1)


def l2_mask(look: Look) -> Tensor:
    """What `kept_mask` keeps with CriticalKV's L2 norm in place of L1."""
    return kept_mask(look, "snapkv+criticalkv", 0.25, norm="l2")


def bounded(look: Look, mask: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    """Theorem 3.3's bound, and how many times what is lost that is."""
    bound = theta(look, mask)
    yield f"theta/{name}", bound
    yield f"theta-over-l1/{name}", bound / lost(look, mask).clamp_min(1e-9)


def alphas(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Table 4 and Appendix C.1: the part of the budget that the first stage has."""
    for base in ("snapkv", "adakv"):
        for alpha in ALPHAS:
            mask = kept_mask(look, f"{base}+criticalkv", 0.25, alpha=alpha)
            yield f"l1-alpha-{alpha:g}/{base}+criticalkv@0.25", lost(look, mask)


def budgets(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Section 4.5 at budgets from 2.5 to 40%, which take longer texts."""
    for base in ("snapkv", "adakv"):
        for budget in BUDGETS:
            for policy in (base, f"{base}+criticalkv"):
                mask = kept_mask(look, policy, budget)
                yield f"l1-budget/{policy}@{budget:g}", lost(look, mask)


def table9(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Table 9: what is lost, its bound, and the bound without the second stage's values.

    With N' and N'' the picks of both stages, s the sum of A over N' and u = v W_O: the bound is
    C - (2 - 1/s) sum over N' and N'' of A |u|_1; relaxed, |u|_1 is the least one in N''. Later
    tokens are kept, and count to N'.
    """
    pipeline = pipeline_of("snapkv", ())
    view, norms = look.layer.view(look.num_tokens, WINDOW), value_norms(look)
    scores, least = pipeline.scorer.score(view), norms[..., : look.num_tokens].amin(dim=2).flatten()
    for budget in (0.2, 0.4):
        mask, name = kept_mask(look, "snapkv+criticalkv", budget), f"snapkv+criticalkv@{budget:g}"
        number = WINDOW + (mask.sum(dim=1) - WINDOW) // 2
        first = mask.clone()
        first[:, : view.num_entries] &= pipeline.selector.select(
            view, scores, number, pipeline.protection
        )
        sums, masses = [], []
        for some in (mask, first):
            parts = look.parts(some, values=norms.mT)
            own = parts.kept.unflatten(1, norms.shape[:2]).diagonal(dim1=2, dim2=3).flatten(1)
            sums.append(own * parts.mass)
            masses.append(parts.mass)
        full = parts.full.unflatten(1, norms.shape[:2]).diagonal(dim1=2, dim2=3).flatten(1)
        factor = 2 - 1 / masses[1]
        relaxed = full - factor * (sums[1] + (masses[0] - masses[1]) * least)
        bound, actual = full - factor * sums[0], lost(look, mask)
        yield f"table9-sigma/{name}", masses[1].mean(dim=0)
        yield f"table9-actual/{name}", actual
        yield f"table9-bound/{name}", bound.mean(dim=0)
        yield f"table9-relaxed/{name}", relaxed.mean(dim=0)
        yield f"table9-ratio/{name}", bound.mean(dim=0) / relaxed.mean(dim=0)
        yield f"table9-bound-over-actual/{name}", bound.mean(dim=0) / actual.clamp_min(1e-9)


def assumption(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Assumption 3.4: the first stage's share of the attention, which ought to be over a half."""
    pipeline = pipeline_of("snapkv", ())
    view = look.layer.view(look.num_tokens, WINDOW)
    scores = pipeline.scorer.score(view)
    for budget in (0.1, 0.25, 0.5):
        kept = look.kept("snapkv", budget).mask.sum(dim=1)
        first = WINDOW + (kept - WINDOW) // 2
        mask = pipeline.selector.select(view, scores, first, pipeline.protection)
        yield f"sigma-later/{budget:g}", look.parts(mask).mass.mean(dim=0)
        yield f"sigma-observed/{budget:g}", look.parts(mask, observed=True).mass.mean(dim=0)


def hidden(
    model: MaskedModel, layers: list[DenseLayer], num_tokens: int, tokens: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """[1] How far the last layer's hidden states are from the full cache's, of what follows.

    |h - h_full| / |h_full| behind the model's last norm, in the mean over tokens.

    Args:
        model: that goes on from what is kept.
        layers: every one, over a text.
        num_tokens: of it that are compressed.
        tokens: [m] what follows them.
    """
    looks = [Look(layer, num_tokens) for layer in layers]
    context = [
        replace(layer, keys=layer.keys[:, :num_tokens], values=layer.values[:, :num_tokens])
        for layer in layers
    ]
    seen: list[Tensor] = []
    hook = model.model.model.norm.register_forward_hook(
        lambda module, args, output: seen.append(output[0].float())
    )
    try:
        model.logits(context, None, tokens)
        full = seen.pop()
        for budget in BUDGETS:
            for policy, params in (("snapkv", {}), ("snapkv+criticalkv", {"norm": "l1"})):
                kept = [look.kept(policy, budget, **params) for look in looks]
                model.logits(context, kept, tokens)
                error = (seen.pop() - full).norm(dim=1) / full.norm(dim=1)
                yield f"hidden/{policy}@{budget:g}", error.mean()[None]
    finally:
        hook.remove()
