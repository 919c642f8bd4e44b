# The worker on CPU: torch without CUDA, and the compiled CPU kernels built beforehand, so that the image needs no compiler.
# Build from the root of the repository: docker build -f deploy/worker.Dockerfile .
FROM python:3.11.14-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY quire/torch-cpu.txt quire/
COPY deploy/requirements.py deploy/
RUN pip install --no-deps -c constraints.txt -r quire/torch-cpu.txt \
  && python deploy/requirements.py worker | pip install -c constraints.txt -r /dev/stdin
COPY . .
RUN pip install --no-deps . \
  && python -m paged_kernels.cpu_library /opt/quire/lib/paged_kernels.so

FROM python:3.11.14-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    QUIRE_KERNEL_LIBRARY=/opt/quire/lib/paged_kernels.so
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["quire", "serve", "worker"]
EXPOSE 50061 8003
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s \
  CMD ["python", "-m", "svc_common.health_probe", "127.0.0.1:50061"]
# Plain text, for a private network of containers; elsewhere certificates (docs/access.md) instead of --insecure.
CMD ["--host", "0.0.0.0", "--insecure", "--model", "/models/tiny"]
