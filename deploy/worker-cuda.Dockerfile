# The worker on an NVIDIA GPU: torch from PyPI, with CUDA. The image has a C compiler, as Triton compiles its launchers at run time.
# Build from the root of the repository: docker build -f deploy/worker-cuda.Dockerfile .
FROM python:3.11.14-slim-bookworm AS build
# Set by `make release`: then files do not contain the time of the build.
ARG SOURCE_DATE_EPOCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/
RUN python deploy/requirements.py worker cuda | pip install -c constraints.txt -r /dev/stdin
COPY . .
RUN pip install --no-deps .

FROM python:3.11.14-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["quire", "serve", "worker"]
EXPOSE 50061 8003
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s \
  CMD ["python", "-m", "svc_common.health_probe", "127.0.0.1:50061"]
# --insecure: plain text, for a private network of containers; elsewhere use certificates (docs/access.md).
CMD ["--host", "0.0.0.0", "--insecure", "--device", "cuda", "--model", "/models/tiny"]
