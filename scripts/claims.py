"""Measures on a model what papers claim of theirs: docs/results/claims.md, row by row.

    python scripts/claims.py models/smollm2 --out claims.json

Texts are those of `vllm-kvcompress eval --tasks text`: their first tokens are compressed, and the
queries of the tokens behind them attend to what is left. Every layer sees the full cache's hidden
states. Heads are query heads, and figures of a head are means over its queries.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.moments import unpack_moments
from vllm_kvcompress.kernels.merging.moments.reference import corrected, split_moments
from vllm_kvcompress.kernels.merging.neighbours import neighbour_cosines
from vllm_kvcompress.policies import Pipeline, resolve
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.tools.evaluation.attention_parts import (
    AttentionParts,
    attend_in_parts,
    estimate_cosine,
    gap_cosine,
    projected_error,
    relative_error,
)
from vllm_kvcompress.tools.evaluation.dense import DenseLayer, DenseModel, Kept, compress
from vllm_kvcompress.tools.evaluation.items import Item, load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt

QUERY_STRIDE = 8  # every eighth later query is looked at
WINDOW = 32


@dataclass
class Look:
    """A layer after its first tokens were compressed.

    Attributes:
        layer: the whole.
        num_tokens: that are compressed.
    """

    layer: DenseLayer
    num_tokens: int

    def __post_init__(self) -> None:
        self._kept: dict[Any, Kept] = {}

    def kept(self, policy: str, budget: float, **params: Any) -> Kept:
        """What a policy keeps; decided once."""
        key = (policy, budget, *params.items())
        if key not in self._kept:
            pipeline = pipeline_of(policy, tuple(params.items()))
            self._kept[key] = compress(pipeline, self.layer, self.num_tokens, budget)
        return self._kept[key]

    def positions(self, observed: bool = False) -> Tensor:
        """Of the queries looked at: later ones, or the window's own that scores come from."""
        if observed:
            return torch.arange(self.num_tokens - WINDOW, self.num_tokens)
        return torch.arange(self.num_tokens, len(self.layer.queries), QUERY_STRIDE)

    def queries(self, observed: bool = False) -> Tensor:
        """[m, H * G, D], times the scale."""
        return self.layer.queries[self.positions(observed)] * self.layer.scale

    def parts(self, mask: Tensor, observed: bool = False) -> AttentionParts:
        """Attention to some of the compressed tokens ([H, n] bool), and to all later ones."""
        layer = self.layer
        later = layer.keys.shape[1] - self.num_tokens
        kept = torch.nn.functional.pad(mask, (0, later), value=True)
        queries = self.queries(observed), self.positions(observed)
        return attend_in_parts(*queries, layer.keys, layer.values, kept)

    def outputs(self, kept: Kept) -> tuple[Tensor, AttentionParts]:
        """What attention gives after a policy, its merger included; and the parts."""
        parts, merged, layer = self.parts(kept.mask), kept.merged, self.layer
        if merged.state is not None:
            return self._corrected(parts, merged.state), parts
        if merged.keys is None and merged.values is None:
            return parts.kept, parts
        keys, values = layer.keys.clone(), layer.values.clone()
        bias = torch.zeros(keys.shape[:2])
        for whole, some in ((keys, merged.keys), (values, merged.values), (bias, merged.bias)):
            if some is not None:
                whole[:, : self.num_tokens] = some
        later = keys.shape[1] - self.num_tokens
        mask = torch.nn.functional.pad(kept.mask, (0, later), value=True)
        asked = self.queries(), self.positions()
        return attend_in_parts(*asked, keys, values, mask, bias=bias).kept, parts

    def moments(self, kept: Kept) -> Tensor:
        """[H, moment_size] of what was evicted."""
        assert kept.merged.state is not None
        return unpack_moments(kept.merged.state, self.layer.keys.shape[2])

    def _corrected(self, parts: AttentionParts, state: Tensor) -> Tensor:
        layer = self.layer
        groups = (len(layer.keys), -1)
        by_head = [
            part.transpose(0, 1).unflatten(0, groups)
            for part in (parts.kept, parts.lse, layer.queries[self.positions()])
        ]
        moments = unpack_moments(state, layer.keys.shape[2])
        outputs = corrected(*by_head, moments, layer.scale)
        return outputs.flatten(0, 1).transpose(0, 1)


@cache
def pipeline_of(policy: str, params: tuple[tuple[str, Any], ...]) -> Pipeline:
    return resolve(policy, dict(params))


def criticalkv(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Section 4.5: the L1 norm of what is lost behind W_O, with and without `criticalkv`."""
    weight = look.layer.output_weight

    def lost(policy: str, budget: float, observed: bool = False, **params: Any) -> Tensor:
        if "criticalkv" in policy:
            params = {"norm": "l1", **params}
        parts = look.parts(look.kept(policy, budget, **params).mask, observed)
        return projected_error(parts.kept, parts, weight).mean(dim=0)

    for base, budgets in (("snapkv", (0.1, 0.25, 0.5)), ("adakv", (0.25, 0.5))):
        for budget in budgets:
            for policy in (base, f"{base}+criticalkv"):
                yield f"l1/{policy}@{budget:g}", lost(policy, budget)
    for policy in ("snapkv", "snapkv+criticalkv"):
        yield f"l1-observed/{policy}@0.25", lost(policy, 0.25, observed=True)
        yield f"l1-plain/{policy}@0.25", lost(policy, 0.25, kernel_size=1)
        yield f"l1-plain-observed/{policy}@0.25", lost(policy, 0.25, True, kernel_size=1)
    for name, value in (("alpha", 0.0), ("epsilon", 0.0), ("guard", "on"), ("weights", "exact")):
        policy = "snapkv+criticalkv"
        yield f"l1-{name}-{value}/{policy}@0.25", lost(policy, 0.25, **{name: value})
    both = [look.kept("snapkv", 0.25).mask, look.kept("snapkv+criticalkv", 0.25, norm="l1").mask]
    yield "same-tokens", (both[0] & both[1]).sum(dim=1) / both[0].sum(dim=1)
    norms = (look.layer.values[:, None, : look.num_tokens] @ by_kv_head(look)).abs().sum(dim=3)
    norms = norms.mean(dim=1)[:, 4:]  # without sinks, whose values are next to nothing
    yield "value-norms/variation", norms.std(dim=1) / norms.mean(dim=1)
    yield "l1-l2/snapkv+criticalkv@0.25", lost("snapkv+criticalkv", 0.25, norm="l2")


def by_kv_head(look: Look) -> Tensor:
    """[H, G, D, M] o_proj."""
    return look.layer.output_weight.unflatten(0, (len(look.layer.keys), -1))


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


def momentkv(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Figures 2 and 3: directions of what is kept, evicted and estimated, and what they cost."""
    for policy in ("snapkv+momentfix", "momentkv"):
        for budget in (0.1, 0.25):
            kept, name = look.kept(policy, budget), f"{policy}@{budget:g}"
            outputs, parts = look.outputs(kept)
            yield f"gap/{name}", gap_cosine(parts).mean(dim=0)
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
        whole = torch.where(some, weights.sum(dim=3, keepdim=True) / count, 1)
        left_out = (weights / whole - 1 - away).masked_fill(~evicted, 0)
        spread = (away.square().sum(dim=3) / count[..., 0]).sqrt()
        widest = (values - mean_value[:, None]).norm(dim=2).masked_fill(kept.mask, 0)
        bound = widest.amax(dim=1)[:, None, None] * left_out.abs().sum(dim=3) / count[..., 0]
        first = torch.einsum("hgmd,hed->hgme", grouped, cross) / count
        true = (weights / whole / count) @ values[:, None]
        size = true.norm(dim=3).clamp_min(tiny)
        errors = {
            order: (true - mean_value[:, None, None] - step).norm(dim=3)
            for order, step in (("zeroth", torch.zeros_like(first)), ("first", first))
        }
        for order, error in errors.items():
            yield f"expansion-{order}/{name}", (error / size).mean(dim=2).flatten()
        yield f"expansion-spread/{name}", spread.mean(dim=2).flatten()
        yield f"expansion-farthest/{name}", away.abs().amax(dim=3).mean(dim=2).flatten()
        yield f"expansion-log-mass/{name}", whole.log().mean(dim=(2, 3)).flatten()
        yield (
            f"expansion-of-bound/{name}",
            (errors["first"] / bound.clamp_min(tiny)).mean(dim=2).flatten(),
        )


def keydiff(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Figure 14: keys unlike the others get more attention (Spearman's rank correlation)."""
    mask = torch.ones(len(look.layer.keys), look.num_tokens, dtype=torch.bool)
    view = look.layer.view(look.num_tokens, 1)
    asked = look.queries(), look.positions()
    layer, groups = look.layer, (len(look.layer.keys), -1)
    grouped = asked[0].unflatten(1, groups).permute(1, 2, 0, 3)
    logits = grouped @ layer.keys[:, None, : look.num_tokens].transpose(2, 3)
    mass = logits.softmax(dim=-1).mean(dim=2)  # [H, G, n]
    for name in ("keydiff", "knorm"):
        score = pipeline_of(name, ()).scorer.score(view)
        yield f"correlation/{name}", rank_correlation(score[:, None], mass).flatten()
    budget = 0.25
    for name in ("keydiff", "knorm", "snapkv", "streamingllm"):
        params = {"skip_layers": 0} if name == "knorm" else {}
        yield f"mass/{name}", look.parts(look.kept(name, budget, **params).mask).mass.mean(dim=0)
    best = torch.zeros_like(mask)
    num_kept = int(look.kept("keydiff", budget).mask[0].sum())
    best.scatter_(1, mass.mean(dim=1).topk(num_kept, dim=1).indices, True)
    yield "mass/best", look.parts(best).mass.mean(dim=0)


def rank_correlation(one: Tensor, other: Tensor) -> Tensor:
    """Spearman's, over the last dim."""
    ranks = [values.argsort(dim=-1).argsort(dim=-1).float() for values in (one, other)]
    centred = [values - values.mean(dim=-1, keepdim=True) for values in ranks]
    return torch.nn.functional.cosine_similarity(*centred, dim=-1)


def kvmerger(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Sections 3.1 and 3.2: how similar neighbouring keys are, and how many may be merged."""
    view = look.layer.view(look.num_tokens, 1)
    cosines = neighbour_cosines(view.kv)[:, 1:]
    yield "neighbours/mean", cosines.mean(dim=1)
    yield "neighbours/above-0.75", (cosines > 0.75).float().mean(dim=1)
    keys = torch.nn.functional.normalize(view.kv.keys(), dim=2)
    far = keys.roll(look.num_tokens // 2, dims=1)
    yield "neighbours/far", (keys * far).sum(dim=2).mean(dim=1)


def kvslimmer(look: Look) -> Iterator[tuple[str, Tensor]]:
    """KVSlimmer's weights against AsymKV's on the same pairs, and what Eq. 33 takes for granted."""
    for policy in ("asymkv", "kvslimmer", "kvmerger", "snapkv"):
        outputs, parts = look.outputs(look.kept(policy, 0.25))
        yield f"merged/{policy}", relative_error(outputs, parts).mean(dim=0)
    view = look.layer.view(look.num_tokens, 128)
    alpha = observed_mass(view)
    alpha = alpha / alpha.sum(dim=1, keepdim=True)
    values = view.kv.values().float()
    residual = values - (alpha[..., None] * values).sum(dim=1, keepdim=True)
    one, two = residual[:, :-1], residual[:, 1:]
    share, other = alpha[:, :-1, None], alpha[:, 1:, None]
    diagonal = share * (1 - 2 * share) * one
    mixed = -share * other * (one + two)
    cosine = torch.nn.functional.cosine_similarity(diagonal, mixed, dim=2)
    yield "eq32/cosine-c11-c12", cosine.mean(dim=1)
    yield "eq32/size-c12-of-c11", (mixed.norm(dim=2) / diagonal.norm(dim=2)).median(dim=1).values


CLAIMS: dict[str, Callable[[Look], Iterator[tuple[str, Tensor]]]] = {
    function.__name__: function
    for function in (criticalkv, assumption, momentkv, expansion, keydiff, kvmerger, kvslimmer)
}


def measure(layers: list[DenseLayer], num_tokens: int, claims: list[str]) -> dict[str, Tensor]:
    """Figures of one text by name, [layers, heads]."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for layer in layers:
        look = Look(layer, num_tokens)
        for claim in claims:
            for name, figure in CLAIMS[claim](look):
                found[name].append(figure)
    return {name: torch.stack(layers) for name, layers in found.items()}


def lower_share(one: Tensor, other: Tensor) -> float:
    """Share of heads in which the first is lower."""
    return float((one < other).float().mean())


def summary(texts: list[dict[str, Tensor]], items: list[Item]) -> dict[str, Any]:
    """Means over texts and heads; of pairs the share of heads that gain."""
    rows: dict[str, Any] = {}
    mean = {name: torch.stack([text[name] for text in texts]).mean(dim=0) for name in texts[0]}
    for name, figure in mean.items():
        rows[name] = {
            "mean": float(figure.mean()),
            "above half": float((figure > 0.5).float().mean()),
            "positive": float((figure > 0).float().mean()),
            "by layer": [round(float(value), 4) for value in figure.mean(dim=1)],
            "by text": [round(float(text[name].mean()), 4) for text in texts],
        }
    for name in mean:
        plain = name.replace("+criticalkv", "")
        pairs = {"+criticalkv": plain if plain in mean else f"l1/{plain.partition('/')[2]}"}
        pairs |= {"kvslimmer": name.replace("kvslimmer", "asymkv")}
        pairs |= {"error-corrected": name.replace("error-corrected", "error-plain")}
        for part, other in pairs.items():
            if part in name and other in mean:
                shares = [lower_share(text[name], text[other]) for text in texts]
                rows[name] |= {
                    "lower than": other,
                    "heads lower": lower_share(mean[name], mean[other]),
                    "heads lower by text": [round(share, 4) for share in shares],
                    "ratio": float(mean[name].mean() / mean[other].mean()),
                }
    rows["texts"] = [item.task for item in items]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--claims", type=lambda text: text.split(","), default=list(CLAIMS))
    parser.add_argument("--samples", type=int, default=5, help="texts of each kind (5)")
    parser.add_argument("--length", type=int, default=1024, help="tokens compressed (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens behind them (256)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first text (0)")
    parser.add_argument("--every", type=int, default=1, help="only every Nth layer (1)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer = load_tokenizer(options.model)
    lengths = [options.length]
    items = load_texts("text", lengths, options.continuation, options.samples, options.seed)
    model = DenseModel(options.model)
    texts = []
    for item in tqdm(items, unit="text"):
        context, continuation = split_prompt(tokenizer, item)
        layers = model.layers([*context, *continuation])[:: options.every]
        texts.append(measure(layers, options.length, options.claims))
    rows = summary(texts, items)
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{'figure':40}{'mean':>9}{'heads lower':>13}{'texts from':>12}{'to':>7}{'ratio':>7}")
    for name, row in rows.items():
        if name == "texts":
            continue
        line = f"{name:40}{row['mean']:9.4f}"
        if "heads lower" in row:
            shares = row["heads lower by text"]
            line += f"{row['heads lower']:13.1%}{min(shares):12.1%}{max(shares):7.1%}"
            line += f"{row['ratio']:7.3f}"
        print(line)


if __name__ == "__main__":
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        main()
