# The trainer for the test cluster: our two packages on a base whose other packages come as a volume.
ARG BASE
FROM ${BASE}
USER 0
COPY fluxtrain /opt/fluxtrain/fluxtrain
COPY slow_steps.py /opt/fluxtrain/
COPY slow_steps-1.dist-info /opt/fluxtrain/slow_steps-1.dist-info
COPY bin/fluxtrain /usr/local/bin/fluxtrain
ENV PYTHONPATH=/opt/fluxtrain:/opt/site-packages
RUN python3 -m compileall -q /opt/fluxtrain
USER 1000
