#!/usr/bin/env python3
"""Writes what is generated in deploy/observability/. Needs grafana-foundation-sdk, a tool.

    python scripts/release/observability.py [--out FOLDER]

- dashboard.json, for Grafana: with the tag and the variables of vLLM's own dashboards, so that it
  appears in their menu and takes over what was chosen there.
- prometheusrule.yaml: rules.yml for the Prometheus operator.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shown
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

OUT = Path(__file__).resolve().parents[2] / "deploy/observability"
TAG = "vllm"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
VARIABLES = {"job": "Job", "model_name": "Model", "instance": "Instance", "engine": "Engine"}
CHOSEN = ", ".join(f'{name}=~"${name}"' for name in VARIABLES)
ENGINE = "{{instance}} · engine {{engine}}"


def chosen(metric: str) -> str:
    """The series that the variables select; engines have no part in prompts' series."""
    parts = CHOSEN.rsplit(", ", 1)[0] if metric.startswith(PROMPT) else CHOSEN
    return f"{metric}{{{parts}}}"


def rate(metric: str, *by: str) -> str:
    """Per second, over all selected series or by labels."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (rate({chosen(metric)}[$__rate_interval]))"


def share(metric: str, of: str, *by: str) -> str:
    """One rate over another; no series while nothing happens."""
    return f"{rate(metric, *by)} / ({rate(of, *by)} > 0)"


def quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', 'le')})"


PROMPT = "kvcompress_prompt_"
SHORTENED = (f"{PROMPT}kept_tokens_total", f"{PROMPT}source_tokens_total")
EVENT, FIRST_TOKEN = "kvcompress_event_seconds", "vllm:time_to_first_token_seconds"
READ = ("kvcompress_read_pages_total", "kvcompress_held_pages_total")
KEPT = ("kvcompress_kept_tokens_total", "kvcompress_source_tokens_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
PREEMPTIONS = "vllm:num_preemptions_total"
USAGE = "vllm:kv_cache_usage_perc"
# Not the gauge of the ratio, which is 1 while nothing runs.
RATIO = ("kvcompress_step_logical_tokens_total", "kvcompress_step_resident_tokens_total")
SHADOWS = ("kvcompress_shadow_changed_tokens_total", "kvcompress_shadow_tokens_total")
PROMISED = "kvcompress_promised_loss"
LOSS = (
    f"({rate('kvcompress_shadow_lost_nats_total', 'instance', 'engine')} - "
    f"{rate('kvcompress_shadow_gained_nats_total', 'instance', 'engine')}) / "
    f"({rate(SHADOWS[1], 'instance', 'engine')} > 0)"
)
GAINED = (
    f"{rate('kvcompress_blocks_freed_total', 'policy')} - "
    f"{rate('kvcompress_blocks_written_total', 'policy')}"
)


@dataclass(frozen=True)
class Shown:
    """One panel.

    Attributes:
        title, description: what a reader sees of it.
        unit: Grafana's name of one.
        queries: expressions by their legends.
        right: the legend of what has an axis of its own, from 0 to 1.
    """

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    right: str | None = None


AT_A_GLANCE = [
    Shown(
        "Compression ratio",
        "Logical over resident tokens while requests run; 1: nothing is compressed.",
        "none",
        {"ratio": share(*RATIO)},
    ),
    Shown("Tokens kept", "Of those that events read.", "percentunit", {"kept": share(*KEPT)}),
    Shown(
        "Blocks gained / s",
        "Freed by events, less those that took the kept tokens.",
        "none",
        {"blocks": GAINED.replace(" by (policy)", "")},
    ),
    Shown("Event p99", "Over all layers.", "s", {"p99": quantile(0.99, EVENT)}),
    Shown(
        "KV cache usage", "Of the fullest engine.", "percentunit", {"max": f"max({chosen(USAGE)})"}
    ),
    Shown("Preemptions / s", "Requests that lost their cache.", "none", {"all": rate(PREEMPTIONS)}),
]
IN_TIME = [
    Shown(
        "Compression ratio",
        "Logical over resident tokens, while requests run.",
        "none",
        {ENGINE: share(*RATIO, "instance", "engine")},
    ),
    Shown(
        "Kept fraction by policy",
        "Tokens that events kept, of those that they read.",
        "percentunit",
        {"{{policy}}": share(*KEPT, "policy")},
    ),
    Shown(
        "Blocks freed less blocks written",
        "What events gave back to other requests, per second.",
        "none",
        {"{{policy}}": GAINED},
    ),
    Shown(
        "KV cache usage beside requests",
        "Usage counts blocks, so it falls when requests are compressed. Full, and requests wait: "
        "compression frees too little. Half empty, and requests wait: raise --max-num-seqs.",
        "none",
        {
            "usage": f"max({chosen(USAGE)})",
            "running": f"sum({chosen('vllm:num_requests_running')})",
            "waiting": f"sum({chosen('vllm:num_requests_waiting')})",
        },
        right="usage",
    ),
    Shown(
        "Preemptions",
        "Running requests that lost their cache and begin anew, per second.",
        "none",
        {ENGINE: rate(PREEMPTIONS, "instance", "engine")},
    ),
    Shown(
        "Events beside the time to first token",
        "How much of the time to first token an event may take.",
        "s",
        {
            **{f"event p{q}": quantile(q / 100, EVENT) for q in (50, 99)},
            **{f"first token p{q}": quantile(q / 100, FIRST_TOKEN) for q in (50, 99)},
        },
    ),
    Shown(
        "Events by policy and trigger",
        "Compression events per second.",
        "none",
        {"{{policy}}, {{trigger}}": rate("kvcompress_events_total", "policy", "trigger")},
    ),
    Shown(
        "Prompts' events by when they run",
        "Per second: after the first token, or before it, where memory or buffers are short.",
        "none",
        {"{{timing}}": rate("kvcompress_event_timing_total", "timing")},
    ),
    Shown(
        "Tokens of the largest request",
        "Per KV head, after a step, since the engine started: at most --kv-ceiling and a block.",
        "none",
        {ENGINE: f"max by (instance, engine) ({chosen('kvcompress_most_held_tokens')})"},
    ),
    Shown(
        "Skipped by reason",
        "Events that a trigger called for but that were left out, per second.",
        "none",
        {"{{reason}}": rate("kvcompress_skipped_total", "reason")},
    ),
    Shown(
        "Contexts reused",
        "Requests per second that began with a context compressed before.",
        "none",
        {ENGINE: rate("kvcompress_contexts_reused_total", "instance", "engine")},
    ),
    Shown(
        "Conversations continued",
        "Requests per second that went on from what an earlier turn had left, compressed.",
        "none",
        {ENGINE: rate("kvcompress_conversations_continued_total", "instance", "engine")},
    ),
    Shown(
        "Tokens not read again",
        "Of conversations that went on, neither read nor compressed again, per second.",
        "none",
        {ENGINE: rate("kvcompress_continued_tokens_total", "instance", "engine")},
    ),
    Shown(
        "States forgotten by reason",
        "Contexts and conversations that are kept no more, per second. Many evicted: the pool is "
        "too small for all, and their next turns read everything again.",
        "none",
        {"{{reason}}": rate("kvcompress_states_forgotten_total", "reason")},
    ),
    Shown(
        "Pages read",
        "By decode steps, of those held (--kv-read).",
        "percentunit",
        {ENGINE: share(*READ, "instance", "engine")},
    ),
    Shown(
        "Tokens of chats before and after --prompt-compressor",
        "As the classifier counts them, per second, beside the part that stays.",
        "none",
        {
            "before": rate(SHORTENED[1]),
            "after": rate(SHORTENED[0]),
            "part": share(*SHORTENED),
        },
        right="part",
    ),
    Shown(
        "Wait for --prompt-compressor",
        "How long a chat waits until it is shortened, other requests' turns included.",
        "s",
        {f"p{q}": quantile(q / 100, f"{PROMPT}seconds") for q in (50, 99)},
    ),
    Shown(
        "Loss against the full cache",
        "Nats per token of answers that --kv-shadow scored again, and what --kv-budget promises.",
        "none",
        {
            ENGINE: LOSS,
            f"{ENGINE}, promised": f"max by (instance, engine) ({chosen(PROMISED)})",
        },
    ),
    Shown(
        "Best candidates changed",
        "Share of the tokens of these answers at whose position the full cache prefers another.",
        "percentunit",
        {ENGINE: share(*SHADOWS, "instance", "engine")},
    ),
    Shown(
        "Answers scored again",
        "By what became of them, per second. Many dropped: the server has no room for them.",
        "none",
        {"{{outcome}}": rate("kvcompress_shadow_answers_total", "outcome")},
    ),
    Shown(
        "Prefix cache hit rate",
        "Prompt tokens found in vLLM's prefix cache, of those looked up.",
        "percentunit",
        {ENGINE: share(*HITS, "instance", "engine")},
    ),
]
SETTINGS = Shown(
    "Settings",
    "What every engine was started with.",
    "none",
    {
        "": f"max by (instance, engine, model_name, policy, budget, trigger, version) "
        f"({chosen('kvcompress_info')})"
    },
)


def fill(panel, what: Shown):
    """Title, queries, unit and description, as all panels have them."""
    metrics = sorted(
        {name for e in what.queries.values() for name in re.findall(r"(\w[\w:]+){", e)}
    )
    named = ", ".join(f"`{name}`" for name in metrics)
    panel.title(what.title).datasource(SOURCE).unit(what.unit)
    panel.description(f"{what.description}\n\nMetrics: {named}")
    for letter, (legend, expression) in zip("ABCDEF", what.queries.items(), strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
        panel.with_target(query)
    return panel


def number(what: Shown) -> stat.Panel:
    calculated = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = fill(stat.Panel().height(4).span(4), what).no_value("No traffic").decimals(2)
    return panel.reduce_options(calculated).graph_mode(shown.BigValueGraphMode.AREA)


def graph(what: Shown) -> timeseries.Panel:
    panel = fill(timeseries.Panel().height(8).span(12), what).min(0)
    legend = common.VizLegendOptions().show_legend(True)
    legend.placement(shown.LegendPlacement.BOTTOM).display_mode(shown.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(shown.TooltipDisplayMode.MULTI)
    panel.legend(legend).tooltip(tooltip)
    panel.fill_opacity(10).show_points(shown.VisibilityMode.NEVER)
    if what.right is not None:
        own = {"unit": "percentunit", "max": 1, "custom.axisPlacement": "right"}
        panel.override_by_name(
            what.right, [models.DynamicConfigValue(id_val=k, value=v) for k, v in own.items()]
        )
    return panel


def settings() -> table.Panel:
    panel = fill(table.Panel().height(6).span(24).show_header(True), SETTINGS)
    (query,) = panel.build().targets
    query.instant, query.range_val, query.format_val = True, False, PromQueryFormat.TABLE
    hidden = {"excludeByName": {"Time": True, "Value": True}}
    return panel.with_transformation(
        models.DataTransformerConfig(id_val="organize", options=hidden)
    )


def variables():
    """vLLM's, by its names and in its order."""
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    before: list[str] = []
    for name, label in VARIABLES.items():
        series = "vllm:num_requests_running"
        if before:
            series += "{" + ", ".join(f'{other}=~"${other}"' for other in before) + "}"
        variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE)
        variable.query(f"label_values({series}, {name})").multi(True).include_all(True)
        variable.current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        yield variable.sort(models.VariableSort.ALPHABETICAL_ASC)
        before.append(name)


def build() -> models.Dashboard:
    """The whole dashboard."""
    board = dashboard.Dashboard("vLLM / KV cache compression").uid("vllm-kv-compression")
    board.description(
        "What vllm-kvcompress compresses, what that frees, and what it costs in time."
    )
    board.tags([TAG]).editable().refresh("30s").time("now-1h", "now")
    board.tooltip(models.DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink("vLLM dashboards").type(models.DashboardLinkType.DASHBOARDS)
    board.link(link.icon("external link").tags([TAG]).include_vars(True).keep_time(True))
    for variable in variables():
        board.with_variable(variable)
    for what in AT_A_GLANCE:
        board.with_panel(number(what))
    for what in IN_TIME:
        board.with_panel(graph(what))
    built = board.with_panel(settings()).build()
    for number_of_panel, panel in enumerate(built.panels, 1):
        panel.id_val = number_of_panel
    return built


def dashboard_json() -> str:
    """The dashboard as Grafana reads it."""
    document = json.loads(JSONEncoder().encode(build()))
    document.pop("style", None)  # which Grafana has given up
    for variable in document["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):  # of variables of other kinds
            del variable[name]
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def prometheus_rule() -> str:
    """The rules as a resource of the Prometheus operator."""
    rules = (OUT / "rules.yml").read_text()
    return (
        "# rules.yml for the Prometheus operator; written by scripts/release/observability.py.\n"
        "apiVersion: monitoring.coreos.com/v1\n"
        "kind: PrometheusRule\n"
        "metadata:\n"
        "  name: vllm-kvcompress\n"
        "  labels:\n"
        "    app.kubernetes.io/name: vllm-kvcompress\n"
        "spec:\n" + textwrap.indent(rules[rules.index("groups:") :], "  ")
    )


def main() -> None:
    """Writes the dashboard and the alerts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    folder = parser.parse_args().out
    (folder / "dashboard.json").write_text(dashboard_json())
    (folder / "prometheusrule.yaml").write_text(prometheus_rule())


if __name__ == "__main__":
    main()
