# ingot serve with its chat page: API on 8000, page on 7860, an engine at /engine.
#   docker build -t ingot:0.1.0 .
#   docker run --gpus all -e INGOT_MODEL_NAME=qwen -v ./engines/qwen:/engine:ro -p 127.0.0.1:8000:8000 \
#       -p 127.0.0.1:7860:7860 ingot:0.1.0
# The same image verifies, aligns and evaluates: docker run … ingot:0.1.0 align /engine --reference /checkpoint
# To pin the base by its digest: --build-arg BASE=debian:bookworm-slim@sha256:…
ARG BASE=debian:bookworm-slim

# hadolint ignore=DL3006
FROM ${BASE} AS build
# Debian keeps only the latest version of a package, so versions are not pinned here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/ingot
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY ingot ingot
RUN /opt/ingot/bin/pip install --no-cache-dir -c constraints.txt '.[align,eval,grammar,image,serve,speech,web]'

# hadolint ignore=DL3006
FROM ${BASE}
# Triton builds a small launcher for each kernel when it first runs: that takes gcc, libc6-dev and Python.h. Its
# assembler for GPUs comes with its own package. CPUs use none of the three.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev libpython3.11-dev python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home ingot \
    && install -d -o ingot -g ingot /home/ingot/.cache
COPY --from=build /opt/ingot /opt/ingot
ENV PATH=/opt/ingot/bin:$PATH \
    INGOT_PORT=8000 \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/home/ingot/.cache/triton
USER 10001
WORKDIR /home/ingot
EXPOSE 8000 7860
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"INGOT_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["ingot"]
CMD ["serve", "/engine", "--host", "0.0.0.0", "--web", "--server-name", "0.0.0.0"]
