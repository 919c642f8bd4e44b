# The worker on CPU: torch without CUDA, and Quire's wheel with the CPU kernels, so the image needs no compiler.
# Build from the root of the repository: docker build -f deploy/worker.Dockerfile .
FROM python:3.11.14-slim-bookworm AS build
# Set by `make release`: then files do not contain the time of the build.
ARG SOURCE_DATE_EPOCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY quire/torch-cpu.txt quire/
COPY deploy/requirements.py deploy/
RUN pip install --no-deps -c constraints.txt -r quire/torch-cpu.txt \
  && python deploy/requirements.py worker | pip install -c constraints.txt -r /dev/stdin
RUN pip install --target /opt/tools -c constraints.txt build cyclonedx-python-lib setuptools ziglang
COPY . .
RUN PYTHONPATH=kernels:/opt/tools python -m deploy.wheel --to /wheels && pip install --no-deps /wheels/*.whl

FROM python:3.11.14-slim-bookworm
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["quire", "serve", "worker"]
EXPOSE 50061 8003
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s \
  CMD ["python", "-m", "svc_common.health_probe", "127.0.0.1:50061"]
# --insecure: plain text, for a private network of containers; elsewhere use certificates (docs/access.md).
CMD ["--host", "0.0.0.0", "--insecure", "--model", "/models/tiny"]
