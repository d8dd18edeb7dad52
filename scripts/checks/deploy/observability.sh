#!/usr/bin/env bash
# Whether dashboard and rules fit each other and a real server: they are what their script writes, Grafana's types and
# promtool accept them, alerts fire when they should, and a real Prometheus that watches a real server answers them all.
# Grafana itself is not run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_debian prometheus:prometheus promtool:prometheus npm:npm
need_python 'grafana-foundation-sdk==1769699998!10.1.0'
cd "$root"
folder=deploy/observability

mkdir -p "$work/observability"
"$tools/python" scripts/release/observability.py --out "$work/observability"
for name in dashboard.json prometheusrule.yaml; do
    cmp "$folder/$name" "$work/observability/$name" || fail "$name is not what scripts/release/observability.py writes; run it"
done

npm install --no-audit --no-fund --prefix "$work/npm" typescript@7.0.2 @grafana/schema@13.2.3
{
    echo 'import type { Dashboard } from "@grafana/schema";'
    echo "export const dashboard: Dashboard = $(cat "$folder/dashboard.json");"
} >"$work/npm/dashboard.ts"
"$work/npm/node_modules/.bin/tsc" --noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext \
    "$work/npm/dashboard.ts"

promtool check rules "$folder/rules.yml"
promtool test rules "$folder/rules_test.yml"
VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" .venv/bin/python scripts/checks/deploy/watched_server.py
