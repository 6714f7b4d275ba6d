# docker build -f deploy/cuda.Dockerfile -t swiftkv:cuda .
# docker run --gpus all --ipc=host …
# torch brings CUDA's libraries; Triton needs a C compiler while it runs. Not yet tried on a GPU.
FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/swiftkv && /opt/swiftkv/bin/pip install --no-cache-dir ".[redis,otlp]" \
    && useradd --create-home --uid 10001 swiftkv
USER swiftkv
WORKDIR /home/swiftkv
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["/opt/swiftkv/bin/swiftkv", "status"]
ENTRYPOINT ["/opt/swiftkv/bin/swiftkv"]
CMD ["serve", "/etc/swiftkv/node.yaml"]
