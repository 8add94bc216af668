# The trainer of the cluster's tests with the hooks of inside_pods.py.
ARG BASE
FROM ${BASE}
COPY inside_pods.py /opt/fluxtrain/
COPY inside_pods-1.dist-info /opt/fluxtrain/inside_pods-1.dist-info
