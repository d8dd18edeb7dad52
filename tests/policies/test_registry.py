"""Policy strings, parameters, and the messages of refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.policies.cases import POLICIES, Shape, headkv_file, make_pipeline
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import Modifier, all_policies, describe, resolve
from vllm_kvcompress.policies.base import Needs
from vllm_kvcompress.policies.headkv import ByImportance
from vllm_kvcompress.policies.registry import bases_of, modifiers
from vllm_kvcompress.scheduling.protocols import PROTOCOLS
from vllm_kvcompress.scheduling.triggers import parse_triggers


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_resolves_under_its_name(policy: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(policy, Shape(pages=(2, 2)), tmp_path)
    assert pipeline.name == policy
    names = {p.name for info in describe(policy) for p in info.parameters()}
    assert set(pipeline.params) == names


def test_the_matrix_covers_every_policy_and_modifier() -> None:
    tested = {part for policy in POLICIES for part in policy.split("+")}
    assert tested == {info.name for info in all_policies()}


def test_criticalkv_is_tested_on_all_that_it_modifies() -> None:
    valid = bases_of(modifiers()["criticalkv"])
    assert {f"{base}+criticalkv" for base in valid} <= set(POLICIES)


def test_defaults_of_all_parts_are_in_the_parameters() -> None:
    assert resolve("adakv+criticalkv").params == {
        "window_size": 32,
        "kernel_size": 7,
        "pooling": "max",
        "safeguard": 0.2,
        "safeguard_mode": "blend",
        "normalize": "off",
        "alpha": 0.5,
        "epsilon": 1e-4,
        "norm": "l2",
    }
    assert resolve("pyramidkv").params["beta"] == 20
    assert resolve("h2o").params == {
        "window_size": 256,
        "recent_fraction": 0.5,
        "stride": 2,
    }
    assert resolve("streamingllm").params == {"num_sinks": 4}
    assert resolve("keydiff").params == {"anchor": "mean_normalized"}
    assert resolve("keydiff+window").params["recent_fraction"] == 0.1


def test_adakv_divides_what_pyramidkv_gives_to_each_layer() -> None:
    plain, divided = (
        resolve(policy).bind(5, 2, 4, block_size=4)
        for policy in ("pyramidkv", "pyramidkv+adakv+criticalkv")
    )
    pages = divided.allocator.layer_pages(30, [200] * 5, 2)
    assert pages == plain.allocator.layer_pages(30, [200] * 5, 2)
    assert pages[0] > pages[-1]
    assert divided.layer_dependent
    assert not resolve("h2o+adakv").layer_dependent


@pytest.mark.parametrize(
    ("policy", "params", "needs"),
    [
        ("streamingllm", {}, Needs()),
        ("keydiff", {}, Needs()),
        ("tova", {}, Needs(window_size=1)),
        ("snapkv", {}, Needs(window_size=32)),
        ("snapkv", {"window_size": 64}, Needs(window_size=64, min_window=32)),
        ("h2o", {}, Needs(window_size=256, accumulated=True, stride=2)),
        ("snapkv+criticalkv", {"norm": "l1"}, Needs(window_size=32, output_weight=True)),
        ("snapkv+criticalkv", {}, Needs(window_size=32, output_root=True)),
        ("snapkv+obcache", {}, Needs(window_size=32, values=True, plain_logits=True)),
        (
            "kvmerger",
            {"stride": 4},
            Needs(256, values=True, plain_logits=True, accumulated=True, stride=4),
        ),
        ("h2o+cam", {"merge_window": 400}, Needs(400, values=True, accumulated=True, stride=2)),
        ("momentkv", {}, Needs(window_size=32, values=True, plain_logits=True)),
        ("tova+momentfix", {}, Needs(window_size=1, values=True, plain_logits=True)),
    ],
)
def test_policies_need_exactly_what_is_listed(
    policy: str, params: dict[str, object], needs: Needs
) -> None:
    assert resolve(policy, params).needs == needs


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            "snapkw",
            'unknown policy "snapkw".*policies are streamingllm, .*modifiers are window, adakv',
        ),
        ("snapkv+", 'unknown policy ""'),
        ("criticalkv", "found 0 policies, and a modifier needs something to modify; choose one of"),
        ("snapkv+snapkv", "the same one twice"),
        ("adakv+headkv", "both decide how much each head keeps; choose one of adakv, headkv"),
        ("expected+adakv+headkv", "headkv and adakv both decide how much each head keeps"),
        ("duoattention+adakv", "both decide how much each head keeps"),
        ("pyramidkv+headkv", "both decide how much each layer keeps"),
        ("knorm+adakv", "by each head's attention mass, which knorm does not score"),
        ("adakv+tova", "by each head's attention mass, which tova does not score"),
        ("adakv+keydiff", "by each head's attention mass, which keydiff does not score"),
        ("snapkv+h2o", "snapkv and h2o each decide on their own what to keep"),
        ("snapkv+criticalkv+criticalkv", "a modifier is named twice; once is enough"),
        ("keydiff+criticalkv", "scores of keydiff are no attention mass.*goes with snapkv, adakv"),
        ("knorm+criticalkv", "scores of knorm are no attention mass"),
        ("streamingllm+criticalkv", "scores of streamingllm are no attention mass"),
        ("duoattention+criticalkv", "scores of duoattention are no attention mass"),
        ("tova+criticalkv", "tova keeps the same entries in all heads"),
        ("momentkv+criticalkv", "momentkv already weighs attention with values"),
        ("kvslimmer+criticalkv", "scores of kvslimmer are no attention mass"),
        ("snapkv+obcache+criticalkv", "obcache and criticalkv both weigh attention with values"),
        ("keydiff+obcache", "obcache replaces the scores of snapkv or h2o, and keydiff is neither"),
        ("h2o+cam+momentfix", "cam and momentfix would both merge the same evicted"),
        ("kvmerger+momentfix", "kvmerger already merges the evicted tokens"),
        ("d2o+cam", "d2o already merges the evicted tokens, which would be counted"),
        ("kvslimmer+asymkv", "kvslimmer and asymkv each decide on their own what to keep"),
        ("kvmerger+adakv", "kvmerger and adakv each decide on their own what to keep"),
        ("snapkv+cam", "cam was made for policies that keep a moving window.*streamingllm, h2o"),
        ("snapkv+window", "already says which recent tokens it keeps; window goes with keydiff"),
    ],
)
def test_combinations_that_are_refused(policy: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        resolve(policy)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "params", "sentence"),
    [
        ("snapkv", {"window": 3}, "snapkv has no parameter window; valid are window_size, kernel"),
        ("tova", {"window_size": 3}, "tova has no parameter window_size; it has none"),
        ("streamingllm", {"kernel_size": 3}, "no parameter kernel_size; valid are num_sinks"),
        ("snapkv", {"window_size": 0}, "window_size: expected at least 1 .* found 0"),
        ("snapkv", {"window_size": 2.5}, "window_size: expected a whole number, found 2.5"),
        ("snapkv", {"window_size": True}, "window_size: expected a whole number, found True"),
        ("snapkv", {"window_size": "many"}, "window_size: expected a whole number, found 'many'"),
        ("snapkv", {"kernel_size": 6}, "kernel_size: expected an odd number.*found 6; use 7"),
        ("snapkv", {"pooling": "min"}, "pooling: expected one of max, mean, found 'min'"),
        ("adakv", {"safeguard": 1.5}, "safeguard: expected at least 0 and at most 1, found 1.5"),
        ("adakv", {"safeguard": float("nan")}, "safeguard: expected a number, found nan"),
        ("adakv", {"safeguard_mode": "none"}, "expected one of blend, floor, found 'none'"),
        ("pyramidkv", {"beta": 0.5}, "beta: expected at least 1 "),
        ("snapkv+criticalkv", {"alpha": -0.1}, "alpha: expected at least 0 and at most 1"),
        ("snapkv+criticalkv", {"norm": "l3"}, "norm: expected one of l1, l2, found 'l3'"),
        ("keydiff", {"metric": "dot"}, "keydiff has no parameter metric; valid are anchor"),
        ("keydiff", {"anchor": "first"}, "anchor: expected one of mean_normalized, mean_raw, f"),
    ],
)
def test_parameters_that_are_refused(policy: str, params: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(policy, params)


def test_modifiers_that_protect_tokens_run_first() -> None:
    first, second = (
        resolve(policy, {"any_scores": "on"})
        for policy in ("keydiff+adakv+window", "keydiff+window+adakv")
    )
    assert first.name == second.name == "keydiff+window+adakv"
    assert first.allocator == second.allocator
    assert first.allocator.protection == first.protection  # type: ignore[attr-defined]


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert resolve("snapkv", {"window_size": 64.0}).params["window_size"] == 64
    assert resolve("adakv", {"safeguard": 1}).params["safeguard"] == 1.0


def test_spaces_around_parts_do_not_matter() -> None:
    assert resolve("adakv + criticalkv").name == "adakv+criticalkv"


def test_policies_that_need_a_profile_say_how_to_make_one() -> None:
    for policy in ("headkv", "headkv+criticalkv", "spans+headkv", "duoattention", "triattention"):
        with pytest.raises(ConfigError, match="vllm-kvcompress profile MODEL --kind"):
            resolve(policy)


@pytest.mark.parametrize("policy", ["keyspans", "spans", "attention"])
def test_headkv_sharpens_heads_for_keyspans_alone(policy: str) -> None:
    """With measured heads 32 queries behind a hit are enough, for all three."""
    pipeline = resolve(f"{policy}+headkv", measures_heads=True)
    assert isinstance(pipeline.allocator, ByImportance)
    assert pipeline.allocator.peak == (10.0 if policy == "keyspans" else 0.0)
    assert pipeline.needs.needed_queries == 32


def test_policies_that_read_no_profile_refuse_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"snapkv .* reads no profile; leave --kv-profile out"):
        resolve("snapkv", None, headkv_file(tmp_path, 1, 2))


def test_budgets_below_what_is_protected_are_refused() -> None:
    resolve("snapkv").check_budget(33)
    resolve("h2o").check_budget(1)
    with pytest.raises(ConfigError, match=r"always keeps 32 .* budget of more than 32"):
        resolve("snapkv").check_budget(31)


def test_every_policy_of_a_paper_has_a_protocol() -> None:
    """With triggers that the settings take; no modifier needs one of its own."""
    own = {info.name for info in all_policies() if not issubclass(info, Modifier)}
    assert set(PROTOCOLS) == own
    for protocol in PROTOCOLS.values():
        assert ",".join(map(str, parse_triggers(protocol.trigger))) == protocol.trigger


def test_every_policy_is_described() -> None:
    for info in all_policies():
        assert re.search(r"(arXiv \d{4}\.\d{5}|ICML 2024)$", info.paper)
        assert info.summary.endswith(".")
        assert info.stages.non_empty()
        for parameter in info.parameters():
            assert parameter.meaning
            assert parameter.check(parameter.default) == parameter.default
