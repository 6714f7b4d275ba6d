# docker build -f deploy/cpu.Dockerfile -t swiftkv .
# An index that has torch without CUDA makes the image some GiB smaller: --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.12-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/swiftkv && /opt/swiftkv/bin/pip install --no-cache-dir ".[redis,otlp]"

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 10001 swiftkv
COPY --from=build /opt/swiftkv /opt/swiftkv
USER swiftkv
WORKDIR /home/swiftkv
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["/opt/swiftkv/bin/swiftkv", "status"]
ENTRYPOINT ["/opt/swiftkv/bin/swiftkv"]
CMD ["serve", "/etc/swiftkv/node.yaml"]
