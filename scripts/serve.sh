#!/usr/bin/env bash
# Sets up and serves the bundled reference model, compressed to a quarter, on port 8000.
# Further arguments are passed on and win, for example: scripts/serve.sh --kv-budget 0.5 --port 8001
#
#   VLLM_CPU_KVCACHE_SPACE  KV cache in GiB (default here: 2)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"

# The model is published in bfloat16, which some CPUs only emulate.
dtype=()
if [[ " $* " != *" --dtype"* && " $* " != *" --config"* ]] &&
    [[ "$("$root/.venv/bin/python" -m vllm_kvcompress.tools.dtypes)" == float32 ]]; then
    echo "serve.sh: --dtype float32, since this CPU would emulate bfloat16; --dtype wins" >&2
    dtype=(--dtype float32)
fi
exec "$root/.venv/bin/vllm-kvcompress" serve "$root/models/reference" \
    --served-model-name reference --port 8000 \
    --kv-policy adakv+criticalkv --kv-budget 0.25 "${dtype[@]}" "$@"
