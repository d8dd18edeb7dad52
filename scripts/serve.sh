#!/usr/bin/env bash
# Sets up and serves a small model, compressed to a quarter, on port 8000.
# Further arguments are passed on and win, for example: scripts/serve.sh --kv-budget 0.5 --port 8001
#
#   MODEL                   reference: the bundled model, which answers what it was trained on (default);
#                           smollm2: SmolLM2-135M-Instruct, a real language model, which is fetched first
#   VLLM_CPU_KVCACHE_SPACE  KV cache in GiB (default here: 2)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model="${MODEL:-reference}"
if [[ "$model" != reference && "$model" != smollm2 ]]; then
    echo "serve.sh: MODEL=$model: expected reference or smollm2; for others: vllm-kvcompress serve" >&2
    exit 2
fi
"$root/scripts/setup.sh"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"
policy=adakv+criticalkv # which the reference model's tour was written with
if [[ "$model" == smollm2 ]]; then
    policy=auto
    "$root/.venv/bin/vllm-kvcompress" fetch-model smollm2 --out "$root/models/smollm2" >&2
fi

# vLLM would take bfloat16, which some CPUs only emulate.
dtype=()
fast='from vllm_kvcompress.tools.dtypes import fast_dtype; print(fast_dtype())'
if [[ " $* " != *" --dtype"* && " $* " != *" --config"* ]] &&
    [[ "$("$root/.venv/bin/python" -c "$fast")" == float32 ]]; then
    echo "serve.sh: --dtype float32, since this CPU would emulate bfloat16; --dtype wins" >&2
    dtype=(--dtype float32)
fi
exec "$root/.venv/bin/vllm-kvcompress" serve "$root/models/$model" \
    --served-model-name "$model" --port 8000 \
    --kv-policy "$policy" --kv-budget 0.25 "${dtype[@]}" "$@"
