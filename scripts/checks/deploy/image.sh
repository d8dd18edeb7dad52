#!/usr/bin/env bash
# Builds both targets of the Dockerfile and serves from the CPU image, as an operator would lock it down: read-only,
# a user that the image does not know, no capabilities. Base images are made of Debian's packages, and the CUDA target is
# built on the CPU image, whose vLLM stands in for the official image's.
#
#   KEEP=1  keep the images
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_debian buildah:buildah podman:podman runc:runc mmdebstrap:mmdebstrap
[[ "$(id -u)" == 0 ]] || fail "image: to be run as root: the base image is made with mmdebstrap and a chroot"

base=localhost/kvcompress-check-debian
standin=localhost/kvcompress-check-vllm
image=localhost/kvcompress-check
container=kvcompress-check
port=18417
export STORAGE_DRIVER=overlay

make_base() { # Debian alone, with the certificates that this machine trusts
    if buildah images "$base" >/dev/null 2>&1; then
        return
    fi
    local from
    mmdebstrap --quiet --variant=minbase --include=ca-certificates bookworm "$work/base.tar"
    from="$(buildah from scratch)"
    buildah add --quiet "$from" "$work/base.tar" / >/dev/null
    buildah copy --quiet "$from" /etc/ssl/certs/ca-certificates.crt \
        /etc/ssl/certs/ca-certificates.crt >/dev/null
    buildah commit --quiet --rm "$from" "$base" >/dev/null
    rm "$work/base.tar"
}

build() { # target, tag, further arguments
    local target="$1" tag="$2" folder options=()
    shift 2
    # pip is set up as on this machine.
    while IFS= read -r folder; do
        [[ -z "$folder" ]] || options+=(--volume "$folder:$folder:ro")
    done < <("$root/.venv/bin/python" "$root/scripts/checks/deploy/pip_configuration.py" "$work/pip.conf")
    # HEALTHCHECK exists in Docker's format alone.
    buildah bud --isolation chroot --network host --format docker --layers \
        --secret "id=pip.conf,src=$work/pip.conf" "${options[@]}" \
        --target "$target" --tag "$tag" "$@" "$root"
}

start() { # tag, arguments after the image; --entrypoint and others may be in `more`
    local tag="$1"
    shift
    # Without systemd podman cannot repeat the HEALTHCHECK, and says so.
    podman --runtime runc --cgroup-manager cgroupfs --events-backend file run \
        --detach --name "$container" --network host \
        --ulimit nofile=20000:20000 --ulimit nproc=30000:30000 \
        --read-only --user 12345:0 --cap-drop all --security-opt no-new-privileges \
        --tmpfs /tmp:mode=1777,exec --tmpfs /home/vllm:mode=1777,exec --shm-size 1g \
        --volume "$root/models/reference:/model:ro" --env VLLM_CPU_KVCACHE_SPACE=1 \
        "${more[@]}" "$image:$tag" "$@" >/dev/null 2>"$work/podman.log" || fail "$(cat "$work/podman.log")"
}

check_doctor() { # tag
    more=(--entrypoint '["vllm-kvcompress", "doctor"]')
    start "$1" /model "${policy[@]}"
    [[ "$(podman wait "$container" 2>/dev/null)" == 0 ]] || fail "image: doctor found a problem"
    podman logs "$container" 2>/dev/null | grep -q "would accept this" ||
        fail "image: doctor looked at no model"
    remove
}

check_health() { # the HEALTHCHECK's own command, at our port
    local code
    code="$(podman inspect --format '{{index .Config.Healthcheck.Test 3}}' "$container")"
    podman exec "$container" python3 -c "${code/8000/$port}"
    ! podman exec "$container" python3 -c "${code/8000/1}" 2>/dev/null || fail "image: HEALTHCHECK is always well"
}

clean_up() {
    local status=$?
    if [[ $status != 0 ]]; then
        podman logs "$container" 2>&1 | tail -n 40 >&2 || true
    fi
    podman rm --force --time 5 "$container" >/dev/null 2>&1 || true
    [[ -n "${KEEP:-}" ]] || buildah rmi "$image:cuda" "$standin" >/dev/null 2>&1 || true
    exit $status
}
trap clean_up EXIT

ask() {
    "$root/.venv/bin/python" "$root/scripts/checks/deploy/ask.py" --address "http://127.0.0.1:$port" "$@"
}

remove() {
    podman rm --force --time 5 "$container" >/dev/null
}

make_base
build cpu "$image:cpu" --build-arg "CPU_BASE_IMAGE=$base"

options=(--served-model-name reference --host 127.0.0.1 --port "$port" --dtype float32 --shutdown-timeout 60)
policy=(--kv-policy adakv+criticalkv --kv-budget 0.25)

echo "image: doctor"
check_doctor cpu

echo "image: vllm-kvcompress serve"
more=()
start cpu /model "${options[@]}" "${policy[@]}"
ask --answers
check_health
ask --drains "podman stop --time 90 $container"
status="$(podman inspect --format '{{.State.ExitCode}}' "$container")"
[[ "$status" == 0 ]] || fail "image: expected exit status 0 after SIGTERM, found $status"
remove

echo "image: vllm serve, with the options that --print-vllm-command prints"
start cpu /model "${options[@]}" "${policy[@]}" --print-vllm-command
podman wait "$container" >/dev/null 2>&1
printed="$(podman logs "$container" 2>/dev/null | tail -n 1)"
remove
eval "words=($printed)" # the words of a shell command, which is what it prints
[[ "${words[0]%%=*} ${words[1]} ${words[2]}" == "VLLM_PLUGINS vllm serve" ]] ||
    fail "image: expected VLLM_PLUGINS=... vllm serve, found: $printed"
more=(--env "${words[0]}" --entrypoint '["vllm"]')
start cpu "${words[@]:2}"
ask --answers
remove

echo "image: the CUDA target, on vLLM's CPU build"
from="$(buildah from "$image:cpu")"
buildah run --isolation chroot --user 0 --network host "$from" -- \
    pip uninstall --quiet --yes --no-cache-dir vllm-kvcompress
buildah config --user 0 "$from"
buildah commit --quiet --rm "$from" "$standin" >/dev/null
build cuda "$image:cuda" --build-arg "BASE_IMAGE=$standin" --build-arg "CPU_BASE_IMAGE=$base"
check_doctor cuda
