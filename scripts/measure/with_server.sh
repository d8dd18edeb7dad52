#!/usr/bin/env bash
# Runs a command beside a server: ADDRESS in its words is replaced by the server's.
#
#     scripts/measure/with_server.sh "models/reference --kv-policy snapkv" COMMAND ADDRESS ...
#
# The first argument is what comes behind `vllm-kvcompress serve`; its log goes to standard error if it does not start.
set -euo pipefail
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
address=http://127.0.0.1:$port
log=$(mktemp)
# shellcheck disable=SC2086 # words of one argument
vllm-kvcompress serve $1 --port "$port" --host 127.0.0.1 >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true; rm -f "$log"' EXIT
until curl -sf "$address/health" >/dev/null; do
    kill -0 "$server" || { cat "$log" >&2; exit 1; }
    sleep 1
done
shift
"${@//ADDRESS/$address}"
