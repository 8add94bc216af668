# The operator image: Python and the Kubernetes client, without torch. Rendezvous pods run `fluxtrain rendezvous` in it.
#   pip wheel --no-deps --wheel-dir dist .
#   buildah build --timestamp $(git log -1 --format=%ct) --file images/operator.Dockerfile --tag fluxtrain/operator:0.1.0 .
# BASE may be a name with a digest, python@sha256:...: then the image is made of known bits only, and is the same in every build.
# Packages are installed from pip's index, and pip compares their hashes with the lock's. To install from a folder of wheels instead, add
#   --volume FOLDER:/wheels:ro --build-arg PIP_OPTIONS="--no-index --find-links=/wheels"
ARG BASE=python:3.12-slim

FROM ${BASE} AS packages
USER 0
ARG VERSION=0.1.0
ARG PIP_OPTIONS=""
# Target folders instead of a virtual environment: they work with any base image that has Python. Dependencies are
# installed first, in the tested versions, so that a new version of fluxtrain changes only a layer of one megabyte.
# Compiled code has hashes of its sources in place of their times, and sets in one order: equal bits in every build.
COPY images/operator-requirements.lock /tmp/
RUN python3 -m pip install --no-cache-dir --no-compile --target /opt/packages ${PIP_OPTIONS} \
    --require-hashes --requirement /tmp/operator-requirements.lock \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /opt/packages
COPY dist/fluxtrain-${VERSION}-py3-none-any.whl /tmp/
RUN python3 -m pip install --no-index --no-deps --no-compile --target /opt/fluxtrain /tmp/fluxtrain-*.whl \
    && PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /opt/fluxtrain

FROM ${BASE}
COPY --from=packages /opt/packages /opt/packages
COPY --from=packages /opt/fluxtrain /opt/fluxtrain
ENV PATH=/opt/fluxtrain/bin:${PATH} \
    PYTHONPATH=/opt/fluxtrain:/opt/packages \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8080
ENTRYPOINT ["python3", "-m", "fluxtrain_operator"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fluxtrain operator" \
      org.opencontainers.image.description="Reconciles FluxTraining resources" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
