"""Has a real Prometheus watch real servers under load, and asks what panels and rules ask.

    .venv/bin/python scripts/checks/deploy/watched_server.py

Exits with an error where an expression has no answer, a metric that is named somewhere is missing
on idle servers, or promtool finds fault with a metric of ours. One server compresses; the other one
shortens prompts, which reused contexts cannot be beside.
"""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from ask import wait_until_healthy
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "release")]

from tests.prompts.trained import train  # noqa: E402
from training.tasks import generate_sample  # noqa: E402
from vllm_kvcompress.tools.dtypes import fast_dtype  # noqa: E402

OBSERVABILITY = ROOT / "deploy" / "observability"
METRIC = re.compile(r"\b(?:kvcompress_|vllm:)[a-z0-9_]+")
LOAD_SECONDS = 25
SERVER = [
    *[sys.executable, "-m", "vllm_kvcompress.cli.main", "serve", str(ROOT / "models/reference")],
    *["--served-model-name", "reference", "--enforce-eager", "--dtype", fast_dtype()],
]
COMPRESSING = ["--kv-policy", "adakv+criticalkv", "--kv-budget", "0.25", "--kv-reuse-contexts"]
COMPRESSING += ["--kv-read", "quest:0.5", "--kv-shadow", "1.0", "--kv-promised-loss", "0.1"]


def main() -> None:
    """Runs the checks, the same servers for all."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shortening = ["--prompt-compressor", f"llmlingua2:{train(folder)}"]
        servers = []
        for number, options in enumerate((COMPRESSING, shortening)):
            port = free_port()
            command = [*SERVER, *options, "--port", str(port), "--host", "127.0.0.1"]
            start(stack, command, folder / f"server-{number}.log")
            servers.append(f"127.0.0.1:{port}")
            wait_until_healthy(f"http://{servers[-1]}")
        check_metrics([get(f"http://{server}/metrics") for server in servers])
        prometheus = start_prometheus(stack, servers, folder)
        num_requests = load(*(f"http://{server}" for server in servers))
        time.sleep(3)  # for the last scrape and the rules
        num_answers = ask_prometheus(prometheus)
        print(f"watched_server: {num_answers} expressions answered after {num_requests} requests")


def start_prometheus(stack: ExitStack, targets: list[str], folder: Path) -> str:
    """Starts one that scrapes every second; returns its address."""
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
        "rule_files": [str(OBSERVABILITY / "rules.yml")],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": targets}]}],
    }
    path, address = folder / "prometheus.yml", f"127.0.0.1:{free_port()}"
    path.write_text(yaml.safe_dump(configuration))
    command = ["prometheus", f"--config.file={path}", f"--web.listen-address={address}"]
    start(stack, [*command, f"--storage.tsdb.path={folder / 'data'}"], folder / "prometheus.log")
    return f"http://{address}"


def start(stack: ExitStack, command: list[str], log: Path) -> None:
    """Starts a process that ends with the stack."""
    output = stack.enter_context(log.open("w"))
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def end() -> None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        if sys.exc_info()[0] is not None:
            print(log.read_text()[-4000:], file=sys.stderr)

    stack.callback(end)


def check_metrics(texts: list[str]) -> None:
    """On idle servers every metric that is named anywhere exists, and ours are well-formed."""
    text = "".join(texts)
    samples = set(re.findall(r"^([a-z][a-z0-9_:]*)(?=[{ ])", text, re.MULTILINE))
    for path in sorted(OBSERVABILITY.iterdir()):
        missing = set(METRIC.findall(path.read_text())) - samples
        if missing:
            fail(f"{path.name} names {sorted(missing)}, which idle servers do not have")
    for text in texts:
        ours = [
            line + "\n"
            for line in text.splitlines()
            if re.match(r"(# (HELP|TYPE) )?kvcompress_", line) and "_created" not in line
        ]
        done = subprocess.run(
            ["promtool", "check", "metrics"], input="".join(ours), text=True, check=False
        )
        if done.returncode != 0:
            fail("promtool finds fault with our metrics")


def load(compressing: str, shortening: str) -> int:
    """Asks for some time, several at once: documents, again, as named contexts, and short ones;
    and chats.
    """
    client, chats = (
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for address in (compressing, shortening)
    )
    end = time.monotonic() + LOAD_SECONDS

    def ask(seed: int) -> int:
        count = 0
        while time.monotonic() < end:
            sample = generate_sample("multikey", num_tokens=512, seed=seed + count // 8)
            text = f"{sample.context}\n{sample.question}"
            for prompt, xargs in (
                (text, {}),
                (text, {"kv_context_tokens": 256}),
                (sample.question, {}),
            ):
                client.completions.create(
                    model="reference",
                    prompt=prompt,
                    max_tokens=8,
                    extra_body={"vllm_xargs": xargs} if xargs else {},
                )
                count += 1
            text = f"{sample.context}\n\n{sample.question}"
            messages: Any = [{"role": "user", "content": text}]
            chats.chat.completions.create(model="reference", messages=messages, max_tokens=8)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        return sum(pool.map(ask, (0, 1000, 2000)))


def ask_prometheus(address: str) -> int:
    """Every expression has an answer, and no number is missing in it; how many there were."""
    asked = [*panels(), *rules()]
    for what, expression in asked:
        expression = re.sub(r"\$(job|model_name|instance|engine)\b", ".+", expression)
        expression = expression.replace("$__rate_interval", f"{LOAD_SECONDS}s")
        query = urllib.parse.urlencode({"query": expression})
        answer: dict[str, Any] = json.loads(get(f"{address}/api/v1/query?{query}"))
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        if not values or any(math.isnan(value) for value in values):
            fail(f"{what}: expected numbers, found {values}: {expression}")
    groups = json.loads(get(f"{address}/api/v1/rules"))["data"]["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        if rule["health"] != "ok":
            fail(f"rule {rule['name']} is {rule['health']}: {rule.get('lastError')}")
    return len(asked)


def panels() -> list[tuple[str, str]]:
    """What the dashboard asks."""
    board = json.loads((OBSERVABILITY / "dashboard.json").read_text())
    return [
        (f"panel {panel['title']!r}", target["expr"])
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def rules() -> list[tuple[str, str]]:
    """What the rules ask, and what they record.

    An alert has no answer while all is well, but each of the sides that it compares has.
    """
    asked = []
    groups = yaml.safe_load((OBSERVABILITY / "rules.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        if "record" in rule:
            asked += [(rule["record"], rule["expr"]), (rule["record"], rule["record"])]
        else:
            for side in re.split(r"\band\b(?: on \([^)]*\))?", rule["expr"]):
                asked.append((rule["alert"], re.sub(r"(==|>) [\d.]+$", "", side.strip())))
    return asked


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


def fail(message: str) -> None:
    raise SystemExit(f"watched_server: {message}")


if __name__ == "__main__":
    main()
