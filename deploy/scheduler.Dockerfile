# The scheduler: no torch. Build from the root of the repository: docker build -f deploy/scheduler.Dockerfile .
FROM python:3.11.14-slim-bookworm AS build
# Set by `make release`: then files do not contain the time of the build.
ARG SOURCE_DATE_EPOCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/
RUN python deploy/requirements.py scheduler | pip install -c constraints.txt -r /dev/stdin
COPY . .
RUN pip install --no-deps .

FROM python:3.11.14-slim-bookworm
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["quire", "serve", "scheduler"]
EXPOSE 50060 50062 8002
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s \
  CMD ["python", "-m", "svc_common.health_probe", "127.0.0.1:50060"]
# --insecure: plain text, for a private network of containers; elsewhere use certificates (docs/access.md).
CMD ["--host", "0.0.0.0", "--insecure", "--worker", "worker:50061"]
