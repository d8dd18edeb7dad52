#!/usr/bin/env bash
# Whether SkyPilot reads our service; its package is large.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tools="$work/skypilot/bin" # it wants an older click than the others
need_python skypilot==0.14.1
cd "$root"
service="$("$tools/python" -c 'import sky; print(sky.Task.from_yaml("deploy/skypilot/serve.yaml").service)')"
grep -q "Autoscaling from 1 to 4 replicas" <<<"$service" || fail "skypilot: read as: $service"
