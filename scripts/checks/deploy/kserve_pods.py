"""Prints what is in deploy/kserve/ of pods as pods, for validators that know only Kubernetes."""

from __future__ import annotations

from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[3] / "deploy" / "kserve"
RUNTIME_ONLY = ("annotations", "multiModel", "supportedModelFormats")


def main() -> None:
    """One pod of each file, with the image that KServe's own configuration has."""
    (service,) = yaml.safe_load_all((FOLDER / "llm-inference-service.yaml").read_text())
    runtime, _ = yaml.safe_load_all((FOLDER / "serving-runtime.yaml").read_text())
    parts = {key: value for key, value in runtime["spec"].items() if key not in RUNTIME_ONLY}
    for name, spec in (("service", service["spec"]["template"]), ("runtime", parts)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        print("---", yaml.safe_dump(pod), sep="\n")


if __name__ == "__main__":
    main()
