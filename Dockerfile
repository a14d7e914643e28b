# Two images from one file: `service` carries no torch, `worker` carries torch with CUDA.
FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 GRADBOX_DATA=/data
RUN useradd --system --uid 10001 --create-home gradbox \
    && mkdir /data && chown gradbox /data
WORKDIR /app
COPY pyproject.toml constraints.txt README.md CHANGELOG.md LICENSE ./
COPY client client
COPY service service
COPY worker worker
VOLUME /data

FROM base AS service
RUN pip install -c constraints.txt '.[service,tracing]'
USER gradbox
EXPOSE 8642
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8642/livez', timeout=4)"]
# Without TLS: the port is published to the host's loopback alone, see docker-compose.yml.
CMD ["gradbox", "service", "--host", "0.0.0.0", "--port", "8642", "--insecure"]

FROM base AS worker
# On Linux the registry's torch wheel brings its CUDA libraries; the host brings the driver.
RUN pip install -c constraints.txt '.[worker,tracing]' transformers timm torchvision
USER gradbox
# The models folder is mounted read-only: its owner fetches what models.toml names beforehand.
ENV HF_HOME=/models/huggingface HF_HUB_OFFLINE=1
HEALTHCHECK --interval=20s --timeout=15s --start-period=300s CMD ["gradbox", "worker", "--check"]
CMD ["gradbox", "worker", "--models", "/models/models.toml", "--device", "auto"]
