#!/usr/bin/env bash
# Makes .venv with everything that serving and testing on CPU need. Does nothing when it is current.
# docs/installing.md says what it needs, and what to do when it fails.
#
#   PYTHON           the interpreter to use (default: python3.11, python3.12 or python3.13, the first
#                    that works; with a current .venv, the one it was made with)
#   TORCH_INDEX_URL  the index that is asked for the CPU build of torch when your default one lacks
#                    it (default: PyTorch's own)
#
# Two of these may run at once: the second waits for the first.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/.kvcompress-setup"
pytorch_index="https://download.pytorch.org/whl/cpu"
supported=(3.11 3.12 3.13)

say() {
    echo "setup: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

version_of() { # interpreter; nothing where it is missing, or a shim with nothing behind it
    local version
    if version="$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"; then
        echo "$version"
    fi
}

is_supported() { # version
    [[ -n "$1" && " ${supported[*]} " == *" $1 "* ]]
}

has() { # interpreter, what
    local code
    case "$2" in
        venv) code='import ensurepip, venv' ;;
        headers) code='import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' ;;
        libnuma) code='import ctypes; ctypes.CDLL("libnuma.so.1")' ;;
    esac
    "$1" -c "$code" 2>/dev/null
}

wanted_stamp() { # version
    (cd "$root" && sha256sum requirements/cpu.lock requirements/dev.lock pyproject.toml)
    # A virtual environment cannot be moved, and the package is installed from this folder.
    echo "$root"
    echo "Python $1"
}

is_current() {
    [[ -f "$stamp" && -x "$venv/bin/vllm-kvcompress" ]] || return 1
    local version
    version="$(version_of "$venv/bin/python")"
    [[ -z "${PYTHON:-}" || "$version" == "$(version_of "$PYTHON")" ]] || return 1
    is_supported "$version" && [[ "$(cat "$stamp")" == "$(wanted_stamp "$version")" ]]
}

choose_python() { # sets python and python_version
    local candidate version candidates=(python3.11 python3.12 python3.13 python3)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    python=""
    for candidate in "${candidates[@]}"; do
        version="$(version_of "$candidate")"
        if is_supported "$version" && { [[ -z "$python" ]] || has "$candidate" venv; }; then
            python="$candidate" python_version="$version"
            ! has "$python" venv || return 0
        fi
    done
    [[ -z "$python" ]] || return 0 # check_system says what it lacks
    [[ -z "${PYTHON:-}" ]] ||
        fail "PYTHON=$PYTHON is ${version:+Python }${version:-no working interpreter}," \
            "but Python 3.11, 3.12 or 3.13 is needed"
    fail "no Python 3.11, 3.12 or 3.13 found; install one (Debian 12: apt-get install" \
        "python3.11-dev python3.11-venv), or name it: PYTHON=/path/to/python3.12"
}

check_system() {
    local name="python$python_version" packages=()
    command -v flock >/dev/null && command -v lscpu >/dev/null || packages+=(util-linux)
    command -v g++ >/dev/null || packages+=(g++) # vLLM compiles model code, for which it needs
    has "$python" headers || packages+=("$name-dev") # Python's header files
    has "$python" venv || packages+=("$name-venv")
    has "$python" libnuma || packages+=(libnuma1) # vLLM's CPU build is linked with it
    [[ ${#packages[@]} -eq 0 ]] ||
        fail "this machine lacks what these packages of Debian and Ubuntu hold:" \
            "apt-get install ${packages[*]} (for the Python at $(command -v "$python"))"
}

make_venv() {
    [[ ! -L "$venv" ]] || fail "$venv is a link, and what it points to is not current; remove the link"
    if [[ -d "$venv" && -n "$(ls -A "$venv")" ]]; then
        [[ -f "$stamp" ]] ||
            fail "$venv was not made by this script, or by an earlier one that did not finish;" \
                "move it away or remove it, and run this again"
        if grep -qxF "$root" "$stamp" && [[ "$(version_of "$venv/bin/python")" == "$python_version" ]] &&
            "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            say "updating $venv ($python is Python $python_version)"
            echo incomplete >"$stamp"
            return
        fi
        # What a run that was killed leaves behind can look installed to pip.
        say "$venv is incomplete, or was made elsewhere or by another Python: starting over"
        echo incomplete >"$stamp" # stays until the last, so that this may be killed as well
        find "$venv" -mindepth 1 -maxdepth 1 ! -path "$stamp" -exec rm -rf {} +
    fi
    say "installing into $venv with Python $python_version ($python):" \
        "about 3.5 GB, a few minutes the first time"
    mkdir -p "$venv"
    echo incomplete >"$stamp"
    "$python" -m venv "$venv"
}

install() { # arguments of pip
    # --no-deps: vLLM's CPU build names CUDA builds of torchvision, torchaudio and torchcodec among
    # its dependencies, and they break its import. The locks list everything else.
    local quiet=(--quiet)
    [[ ! -t 3 ]] || quiet=() # on a terminal pip shows a bar for every download
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps "${quiet[@]}" "$@" >&3
}

install_torch() {
    local torch index="${TORCH_INDEX_URL:-$pytorch_index}" errors="$venv/torch-errors.txt"
    torch="$(grep '^torch==' "$root/requirements/cpu.lock")"
    say "1/4 $torch, about 200 MB"
    ! install "$torch" 2>"$errors" || return 0
    say "your default package index lacks it, asking $index"
    install --index-url "$index" "$torch" ||
        fail "could not install $torch from $index; if another index has it, name that one:" \
            "TORCH_INDEX_URL=... The default index said: $(tail -n 3 "$errors")"
}

if is_current; then
    exit 0
fi
choose_python
check_system

exec 3>&2 # what pip says on its way, but for errors
exec 9<"${BASH_SOURCE[0]}" # the lock is on this script: .venv may not exist yet
flock --nonblock 9 || {
    say "waiting for another set-up of $venv"
    flock 9
}
if is_current; then
    exit 0
fi

new_stamp="$(wanted_stamp "$python_version")"
make_venv
install_torch
say "2/4 vLLM's CPU build and what it needs: $(grep -c == "$root/requirements/cpu.lock") packages"
install -r "$root/requirements/cpu.lock" || fail "could not install requirements/cpu.lock"
say "3/4 tools to test, lint and plot: $(grep -c == "$root/requirements/dev.lock") packages"
install --use-pep517 -r "$root/requirements/dev.lock" || fail "could not install requirements/dev.lock"
say "4/4 this package"
install --no-build-isolation -e "$root" || fail "could not install this package"
echo "$new_stamp" >"$stamp"
say "done"
