"""The operator: from a FluxTraining to its objects in the cluster, and back to its status."""
