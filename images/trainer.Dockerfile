# The trainer, on an image that brings torch for its GPUs: AMD's PyTorch training image unless BASE says otherwise.
#   pip wheel --no-deps --wheel-dir dist .
#   buildah build --file images/trainer.Dockerfile --tag fluxtrain/trainer:0.1.0 .
# Packages come from pip's index, or, with --build-arg PIP_OPTIONS=--no-index, from wheels beside ours in dist/.
ARG BASE=rocm/primus:v26.2

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG PIP_OPTIONS=""
LABEL org.opencontainers.image.title="fluxtrain trainer" \
      org.opencontainers.image.description="Trains FLUX.1 under torchrun" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 0
COPY dist /wheels
COPY images/trainer-requirements.txt /wheels/trainer-requirements.txt
# What the base has already is kept, torch above all: nothing in the list asks for it, and ours comes without
# dependencies. The variable is for bases whose Python belongs to their distribution.
RUN export PIP_BREAK_SYSTEM_PACKAGES=1 \
 && python3 -m pip install --no-cache-dir --find-links /wheels ${PIP_OPTIONS} --requirement /wheels/trainer-requirements.txt \
 && python3 -m pip install --no-cache-dir --no-index --no-deps /wheels/fluxtrain-*.whl
ENV PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 1000:1000
WORKDIR /tmp
EXPOSE 9464 29500
ENTRYPOINT ["fluxtrain"]
