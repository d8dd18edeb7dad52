#!/usr/bin/env bash
# Asks a running server (scripts/serve.sh) through lm_eval, EleutherAI's evaluation harness, in a
# virtual environment of its own. Further arguments go to lm_eval.
#
#   BASE_URL  of the server (default: http://127.0.0.1:8000)
#   PYTHON    the interpreter to use (default: that of .venv)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-lm-eval"
"$root/scripts/setup.sh"
[[ -x "$venv/bin/lm_eval" ]] || {
    "${PYTHON:-$root/.venv/bin/python}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "lm_eval[api]==0.4.13"
}

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp "$root/docs/lm_eval/kvcompress_words.yaml" "$work"
cd "$work"
PYTHONPATH="$root/scripts/release" "$root/.venv/bin/python" - >kvcompress_words.jsonl <<'PY'
import dataclasses
import json

from training.tasks import generate_sample

for family in ("single", "multikey"):
    for number in range(10):
        sample = generate_sample(family, num_tokens=1024, seed=2_000_000 + number)
        print(json.dumps(dataclasses.asdict(sample)))
PY
url="${BASE_URL:-http://127.0.0.1:8000}/v1/chat/completions"
"$venv/bin/lm_eval" run --model local-chat-completions \
    --model_args "model=reference,base_url=$url,num_concurrent=4,max_retries=1" \
    --apply_chat_template --include_path . --tasks kvcompress_words "$@"
