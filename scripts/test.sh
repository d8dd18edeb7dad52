#!/usr/bin/env bash
# Sets up and runs the test suite, in two processes. With arguments, which go to pytest, in one:
#   scripts/test.sh tests/test_config.py -k budget
#
#   VLLM_CPU_KVCACHE_SPACE  KV cache in GiB of each server and engine under test (default here: 1)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
# Threads that wait for others leave the core to whoever else is tested.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
cd "$root"
if [[ $# -eq 0 ]]; then
    # A file's tests share servers and engines, so they stay in one process; tests/conftest.py orders them.
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder
    # Each process has a core: threads that share one with the other's wait for it at every operator.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
fi
exec .venv/bin/python -m pytest "$@"
