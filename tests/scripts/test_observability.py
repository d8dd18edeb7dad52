"""Metrics that deploy/observability/ names exist; check_deploy.sh asks a real Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.metrics.prometheus import CompressionMetrics
from vllm_kvcompress.metrics.prompts import PromptMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
OPERATING = (ROOT / "docs" / "operating.md").read_text()
OURS = re.compile(r"\bkvcompress_[a-z0-9_]+")


@pytest.fixture(scope="module")
def samples() -> set[str]:
    """Returns the names of the series that servers show before the first request."""
    registry = CollectorRegistry()
    metrics = CompressionMetrics(registry)
    metrics.start(Settings(policy="snapkv", shadow=0.01, promised_loss=0.02), "tiny", "0")
    metrics.show_heads("cache", "tiny", "0")
    PromptMetrics(registry).start("tiny")
    return {sample.name for metric in registry.collect() for sample in metric.samples}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_every_metric_exists_on_an_idle_server(path: Path, samples: set[str]) -> None:
    assert set(OURS.findall(path.read_text())) <= samples


def test_every_metric_and_alert_is_documented(samples: set[str]) -> None:
    named = {name for name in samples if not name.endswith("_created")}
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    documented = {re.sub(r"_(bucket|sum|count)$", "", name) for name in OURS.findall(OPERATING)}
    assert documented == metrics
    alerts = re.findall(r"alert: (\w+)", (FOLDER / "rules.yml").read_text())
    assert len(alerts) == 7
    for alert in alerts:
        assert f"`{alert}`" in OPERATING


def test_dashboard_has_the_tags_and_variables_of_vllms() -> None:
    """Every panel is filtered by the variables; prompts are not shortened by engines."""
    board = json.loads((FOLDER / "dashboard.json").read_text())
    assert board["tags"] == ["vllm"]
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "job", "model_name", "instance", "engine"]
    for panel in board["panels"]:
        for target in panel["targets"]:
            prompts = "kvcompress_prompt_" in target["expr"]
            for name in names[1:]:
                selected = f'{name}=~"${name}"' in target["expr"]
                assert selected != (prompts and name == "engine"), panel["title"]


def test_rules_of_the_operator_equal_the_prometheus_rules() -> None:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    assert yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text())["spec"] == rules
