"""Measures on a model what papers claim of theirs: docs/results/claims.md, row by row.

    python scripts/measure/claims.py models/smollm2 --out claims.json

Texts are those of `vllm-kvcompress eval --tasks text`: their first tokens are compressed, and the
queries of the tokens behind them attend to what is left. Every layer sees the full cache's hidden
states. Heads are query heads, and figures of a head are means over its queries.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_parts import relative_error
from claim_parts.criticalkv import alphas, assumption, budgets, criticalkv, hidden, table9
from claim_parts.look import Look, pipeline_of
from claim_parts.momentkv import equations, expansion, momentkv, regime, remainders
from offline.masked import MaskedModel
from vllm_kvcompress.kernels.merging.neighbours import neighbour_cosines
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt


def keydiff(look: Look) -> Iterator[tuple[str, Tensor]]:
    """Figure 2: keys unlike the others get more attention (Spearman's rank correlation).

    And Figure 14: the cosine of the mean key with the mean query, and with every query.
    """
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
    mean_key = layer.keys[:, : look.num_tokens].mean(dim=1)[:, None]
    cosine = torch.nn.functional.cosine_similarity
    mean_query = layer.queries[: look.num_tokens].mean(dim=0).unflatten(0, groups)
    yield "mean-key/mean-query", cosine(mean_key, mean_query, dim=2).flatten()
    by_query = cosine(mean_key[:, :, None], grouped, dim=3)  # [H, G, m]
    yield "mean-key/query", by_query.mean(dim=2).flatten()
    yield "mean-key/query-positive", (by_query > 0).float().mean(dim=2).flatten()
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


Figures = dict[str, Tensor]  # of one text, [layers, heads]
CLAIMS: dict[str, Callable[[Look], Iterator[tuple[str, Tensor]]]] = {
    function.__name__: function
    for function in (
        criticalkv,
        alphas,
        assumption,
        table9,
        momentkv,
        regime,
        expansion,
        equations,
        remainders,
        keydiff,
        kvmerger,
        kvslimmer,
        budgets,
    )
}
OF_MODELS = {"hidden": hidden}  # these look at a model, not at layers one by one
LONG = ("budgets", "hidden", "regime")  # for other lengths than the rest


def measure(
    model: MaskedModel, tokens: tuple[list[int], list[int]], claims: list[str], every: int
) -> Figures:
    """Figures of one text, by name."""
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    layers, num_tokens = model.layers([*tokens[0], *tokens[1]]), len(tokens[0])
    for layer in layers[::every]:
        look = Look(layer, num_tokens)
        for claim in claims:
            for name, figure in CLAIMS[claim](look) if claim in CLAIMS else ():
                by_name[name].append(figure)
    for claim in OF_MODELS.keys() & claims:
        for name, figure in OF_MODELS[claim](model, layers, num_tokens, torch.tensor(tokens[1])):
            by_name[name].append(figure)
    return {name: torch.stack(figures) for name, figures in by_name.items()}


def lower_share(one: Tensor, other: Tensor) -> float:
    """Share of heads in which the first is lower."""
    return float((one < other).float().mean())


def summary(texts: list[Figures], items: list[Item]) -> dict[str, Any]:
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    most = [claim for claim in CLAIMS if claim not in LONG]
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument(
        "--claims",
        type=lambda text: text.split(","),
        default=most,
        help=f"({','.join(most)}; not {','.join(LONG)})",
    )
    parser.add_argument("--samples", type=int, default=5, help="texts of each kind (5)")
    parser.add_argument("--length", type=int, default=1024, help="tokens compressed (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens behind them (256)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first text (0)")
    parser.add_argument("--every", type=int, default=1, help="only every Nth layer (1)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.json", help="and FILE.pt, to go on from"
    )
    return parser.parse_args()


def main() -> None:
    options = parsed()
    from tqdm import tqdm

    tokenizer = load_tokenizer(options.model)
    lengths, so_far = [options.length], options.out.with_suffix(".pt")
    samples = options.samples
    by_kind = load_texts("text", lengths, options.continuation, samples, options.seed)
    items = [item for start in range(samples) for item in by_kind[start::samples]]  # kinds in turn
    model = MaskedModel(options.model)
    texts: list[Figures] = torch.load(so_far) if so_far.exists() else []
    for item in tqdm(items[len(texts) :], unit="text"):
        tokens = split_prompt(tokenizer, item)
        texts.append(measure(model, tokens, options.claims, options.every))
        torch.save(texts, so_far)
        rows = summary(texts, items[: len(texts)])
        lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print_table(summary(texts, items))


def print_table(rows: dict[str, Any]) -> None:
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
