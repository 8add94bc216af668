"""The FluxTraining resource: spec and status."""
