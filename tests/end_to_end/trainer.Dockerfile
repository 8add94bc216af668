# The trainer for the test cluster: our two packages on a base whose other packages come as a volume.
ARG BASE
FROM ${BASE}
COPY fluxtrain /opt/fluxtrain/fluxtrain
COPY bin/fluxtrain /usr/local/bin/fluxtrain
ENV PYTHONPATH=/opt/fluxtrain:/opt/site-packages
