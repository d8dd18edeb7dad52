#!/usr/bin/env bash
# Sets up and runs the test suite. Further arguments go to pytest, for example:
#   scripts/test.sh tests/test_config.py -k budget
#
#   VLLM_CPU_KVCACHE_SPACE  KV cache in GiB of each server and engine under test (default here: 1)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
cd "$root"
exec .venv/bin/python -m pytest "$@"
