"""Files of deploy/ start the command that they name, on vLLM's CUDA build.

vLLM's own parser reads every command there, in a process where its platform is CUDA. Whether
charts and clusters accept the files is checked by scripts/checks/check_deploy.sh.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from vllm_kvcompress.metrics.prometheus import CompressionMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def promised(name: str) -> list[str]:
    """Returns the words of the `vllm-kvcompress serve` command in a file's first comment."""
    comment = re.match(r"(#.*\n)+", (DEPLOY / name).read_text())
    assert comment is not None
    text = re.sub(r"\\\n#", "", comment.group())
    (command,) = re.findall(r"vllm-kvcompress serve (.*) --print-vllm-command\n", text)
    return shlex.split(command)


def production_stack() -> list[str]:
    """Returns the command that the chart makes of its values, without its own additions."""
    (model,) = read("helm/production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    options = model["vllmConfig"]
    assert options["enablePrefixCaching"]
    length = str(options["maxModelLen"])
    return [model["modelURL"], "--max-model-len", length, *options["extraArgs"]]


def llm_d() -> list[str]:
    values = read("helm/llm-d-modelservice.yaml")
    (container,) = values["decode"]["containers"]
    return [values["modelArtifacts"]["name"], *container["args"]]


def kserve() -> list[str]:
    spec = read("kserve/llm-inference-service.yaml")["spec"]
    ((container),) = spec["template"]["containers"]
    ((variable),) = container["env"]
    assert variable["name"] == "VLLM_ADDITIONAL_ARGS"
    return [spec["model"]["name"], *variable["value"].split()]


def serving_runtime() -> list[str]:
    runtime, service = yaml.safe_load_all((DEPLOY / "kserve/serving-runtime.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    return [*container["args"], *service["spec"]["predictor"]["model"]["args"]]


def skypilot() -> list[str]:
    task = read("skypilot/serve.yaml")
    command = task["run"].replace("\\\n", "").replace("$MODEL", task["envs"]["MODEL"])
    words = shlex.split(command)
    assert words[:2] == ["vllm-kvcompress", "serve"]
    return words[2:]


STOCK = {  # files whose charts start `vllm serve`
    "helm/production-stack.yaml": production_stack,
    "helm/llm-d-modelservice.yaml": llm_d,
    "kserve/llm-inference-service.yaml": kserve,
}
OURS = {  # files that start `vllm-kvcompress serve`
    "kserve/serving-runtime.yaml": serving_runtime,
    "skypilot/serve.yaml": skypilot,
    "kubernetes/serve.yaml": lambda: ["--config", str(DEPLOY / "kubernetes/serve.yaml")],
    "compose/serve.yaml": lambda: ["--config", str(DEPLOY / "compose/serve.yaml")],
}


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, Any]]:
    """vLLM's options by file, and those of the promised command by `NAME, promised`."""
    commands = {name: ("vllm", words()) for name, words in STOCK.items()}
    commands |= {f"{name}, promised": ("ours", promised(name)) for name in STOCK}
    commands |= {name: ("ours", words()) for name, words in OURS.items()}
    output = subprocess.run(
        [sys.executable, "-m", "tests.cli.on_cuda", json.dumps([*commands.values()])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert output.returncode == 0, output.stderr[-3000:]
    return dict(zip(commands, json.loads(output.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", STOCK)
def test_deploy_files_have_the_options_of_the_printed_command(
    parsed: dict[str, Any], name: str
) -> None:
    assert parsed[name] == parsed[f"{name}, promised"]
    assert parsed[name]["attention_backend"] == "CUSTOM"


@pytest.mark.parametrize("name", [*STOCK, *OURS])
def test_deployed_servers_compress_under_pressure_and_drain(
    parsed: dict[str, Any], name: str
) -> None:
    settings = parsed[name]["additional_config"]["kvcompress"]
    assert settings == {"policy": "adakv+criticalkv", "budget": 0.25, "trigger": "pressure:0.9"}
    kubernetes_default = 30  # seconds, which production-stack's chart cannot change
    expected = kubernetes_default - 5 if "production-stack" in name else 120
    assert parsed[name]["shutdown_timeout"] == expected


def test_pods_have_time_to_drain(parsed: dict[str, Any]) -> None:
    pod = read("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (seconds,) = container["lifecycle"]["preStop"]["exec"]["command"][1:]
    drain = int(seconds) + parsed["kubernetes/serve.yaml"]["shutdown_timeout"]
    assert drain < pod["terminationGracePeriodSeconds"]
    kserve_pod = read("kserve/llm-inference-service.yaml")["spec"]["template"]
    assert kserve_pod["terminationGracePeriodSeconds"] > 120
    assert read("helm/llm-d-modelservice.yaml")["decode"]["terminationGracePeriodSeconds"] > 120
    _, service = yaml.safe_load_all((DEPLOY / "kserve/serving-runtime.yaml").read_text())
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > 120
    server = read("compose/compose.yaml")["services"]["server"]
    assert int(server["stop_grace_period"].removesuffix("s")) > 120


def test_read_only_pods_can_write_where_the_image_needs_to() -> None:
    """Home, /tmp and shared memory, which scripts/checks/check_deploy.sh also mounts."""
    pod = read("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    writable = {each["mountPath"] for each in container["volumeMounts"] if "readOnly" not in each}
    assert {"/home/vllm", "/tmp", "/dev/shm"} <= writable


def test_endpoint_picker_reads_an_existing_metric() -> None:
    config = read("llm-d/epp.yaml")
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in config["plugins"]}
    engine = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"][0]
    (metric,) = engine["customMetrics"]
    gauge = CompressionMetrics(CollectorRegistry()).gauges["reclaimable_blocks"]
    assert [metric["metricSpec"]] == [family.name for family in gauge.collect()]
    scorer = plugins["reclaimable-blocks-scorer"]["parameters"]
    assert scorer["attributeKey"] == metric["attributeKey"]
    (profile,) = config["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} <= set(plugins)
