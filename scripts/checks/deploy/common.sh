# What the checks of scripts/checks/check_deploy.sh share: where things are, and tools. To be sourced.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
work="$root/build/deploy" # out of git
tools="$work/venv/bin"
mkdir -p "$work"
export npm_config_loglevel=error npm_config_fetch_retries=1 npm_config_fetch_timeout=60000

fail() {
    echo "check_deploy: $*" >&2
    exit 1
}

need_debian() { # command:package...; what is not there has to be installed by whoever runs this
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || [[ " ${missing[*]} " == *" ${pair##*:} "* ]] ||
            missing+=("${pair##*:}")
    done
    [[ ${#missing[@]} -eq 0 ]] || fail "missing; on Debian: apt-get install --yes ${missing[*]}"
}

need_python() { # requirements of tools that are no part of any lock, for the environment of $tools
    [[ -x "$tools/python" ]] || "$root/.venv/bin/python" -m venv "${tools%/bin}"
    "$tools/python" -m pip install --quiet --disable-pip-version-check "$@"
}
