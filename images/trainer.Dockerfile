# The trainer, on an image that brings torch for its GPUs: AMD's PyTorch training image unless BASE says otherwise.
#   pip wheel --no-deps --wheel-dir dist .
#   buildah build --file images/trainer.Dockerfile --tag fluxtrain/trainer:0.1.0 .
# Packages come from pip's index. From a folder of wheels, where there is no index: add
#   --volume FOLDER:/wheels:ro --build-arg PIP_OPTIONS="--no-index --find-links=/wheels"
ARG BASE=rocm/primus:v26.2

FROM ${BASE}
ARG VERSION=0.1.0
ARG PIP_OPTIONS=""
USER 0
# What the base has already is kept, torch above all: nothing in the list asks for it, and ours comes without
# dependencies. The variable is for bases whose Python belongs to their distribution.
COPY images/trainer-requirements.txt /tmp/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir ${PIP_OPTIONS} \
    --requirement /tmp/trainer-requirements.txt
COPY dist/fluxtrain-${VERSION}-py3-none-any.whl /tmp/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-index --no-deps --force-reinstall \
    /tmp/fluxtrain-*.whl
ENV PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 1000:1000
WORKDIR /tmp
EXPOSE 9464 29500
ENTRYPOINT ["fluxtrain"]
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fluxtrain trainer" \
      org.opencontainers.image.description="Trains FLUX.1 under torchrun" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
