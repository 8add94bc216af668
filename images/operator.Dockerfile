# The operator: Python, its API client, no torch.
#   pip wheel --no-deps --wheel-dir dist .
#   buildah build --file images/operator.Dockerfile --tag fluxtrain/operator:0.1.0 .
# Packages come from pip's index, or, with --build-arg PIP_OPTIONS=--no-index, from wheels beside ours in dist/.
ARG BASE=python:3.12-slim

FROM ${BASE} AS packages
USER 0
ARG PIP_OPTIONS=""
COPY dist /wheels
# A folder of its own instead of an environment: it works the same on any base with a Python, and copies as one layer.
RUN wheel="$(ls /wheels/fluxtrain-*.whl)" \
 && python3 -m pip install --no-cache-dir --find-links /wheels --target /opt/fluxtrain ${PIP_OPTIONS} "${wheel}[operator]"

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fluxtrain operator" \
      org.opencontainers.image.description="Reconciles FluxTraining resources" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=packages /opt/fluxtrain /opt/fluxtrain
ENV PYTHONPATH=/opt/fluxtrain \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8080
ENTRYPOINT ["python3", "-m", "fluxtrain_operator"]
