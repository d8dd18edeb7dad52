#!/usr/bin/env bash
# Runs vLLM's own command line out of .venv, for example: scripts/vllm.sh bench serve --help
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m vllm_kvcompress.cli.stock_vllm "$@"
