#!/usr/bin/env bash
# Checks the image and what is in deploy/ with the tools that operators use; a script per check in scripts/checks/deploy/.
#
#   scripts/checks/check_deploy.sh --quick    what takes minutes
#   scripts/checks/check_deploy.sh            everything: also builds images and serves from them (Debian, as root)
#   scripts/checks/check_deploy.sh NAME...    these checks, for example: image
#
# What a check lacks of Debian's packages it names, and tools in Python it installs under build/deploy/.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
quick=(manifests observability)
more=(skypilot image)

checks=("${quick[@]}" "${more[@]}")
if [[ "${1:-}" == --quick ]]; then
    checks=("${quick[@]}")
elif [[ $# -gt 0 ]]; then
    checks=("$@")
fi
for name in "${checks[@]}"; do
    [[ -f "$root/scripts/checks/deploy/$name.sh" ]] || {
        echo "check_deploy: no check called $name; there are: ${quick[*]} ${more[*]}" >&2
        exit 2
    }
done
"$root/scripts/setup.sh"
for name in "${checks[@]}"; do
    echo "check_deploy: $name"
    bash "$root/scripts/checks/deploy/$name.sh"
done
echo "check_deploy: all well: ${checks[*]}"
