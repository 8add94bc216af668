# The trainer image. BASE must provide torch for the GPUs; the default is AMD's PyTorch training image.
#   pip wheel --no-deps --wheel-dir dist .
#   buildah build --file images/trainer.Dockerfile --tag fluxtrain/trainer:0.1.0 .
# BASE may be a name with a digest, rocm/primus@sha256:...: torch for AMD GPUs, ROCm and RCCL are the base's.
# Packages are installed from pip's index, and pip compares their hashes with the lock's. To install from a folder of wheels instead, add
#   --volume FOLDER:/wheels:ro --build-arg PIP_OPTIONS="--no-index --find-links=/wheels"
# Not included: what logging.tensorboard and logging.wandb need. To add both, with the hashes of their lock:
#   --build-arg EXTRA_PACKAGES="tensorboard wandb"
# Compiled code has hashes of its sources in place of their times (SOURCE_DATE_EPOCH), and sets in one order.
ARG BASE=rocm/primus:v26.2

FROM ${BASE}
ARG VERSION=0.1.0
ARG PIP_OPTIONS=""
ARG EXTRA_PACKAGES=""
USER 0
# The base image's torch is kept: no requirement depends on it, and fluxtrain is installed without dependencies. Other
# packages get the tested versions. PIP_BREAK_SYSTEM_PACKAGES is needed if the distribution manages the base's Python.
ARG SOURCE_DATE_EPOCH=0
ARG PYTHONHASHSEED=0
ARG PIP_BREAK_SYSTEM_PACKAGES=1
COPY images/*-requirements.lock /tmp/
RUN python3 -m pip install --no-cache-dir ${PIP_OPTIONS} \
    --require-hashes --requirement /tmp/trainer-requirements.lock
RUN for name in ${EXTRA_PACKAGES}; do python3 -m pip install --no-cache-dir ${PIP_OPTIONS} \
    --require-hashes --requirement /tmp/${name}-requirements.lock || exit 1; done
COPY dist/fluxtrain-${VERSION}-py3-none-any.whl /tmp/
RUN python3 -m pip install --no-index --no-deps --no-cache-dir --force-reinstall /tmp/fluxtrain-*.whl
ENV PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 1000:1000
WORKDIR /tmp
EXPOSE 9464 29500
ENTRYPOINT ["fluxtrain"]
# The commit of the sources: MLPerf logs state it.
ARG REVISION=unknown
ENV FLUXTRAIN_REVISION=${REVISION}
LABEL org.opencontainers.image.title="fluxtrain trainer" \
      org.opencontainers.image.description="Trains FLUX.1 under torchrun" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
