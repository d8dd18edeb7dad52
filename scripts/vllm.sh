#!/usr/bin/env bash
# Runs vLLM's own command line out of .venv, for example: scripts/vllm.sh bench serve --help
#
# vLLM's CPU build is installed under another name than the one its command asks for.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -c '
from vllm_kvcompress.vllm_plugin.distribution import answer_for_vllm

answer_for_vllm()
from vllm.entrypoints.cli.main import main

main()
' "$@"
