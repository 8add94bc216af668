"""Metrics and sample images for TensorBoard and Weights & Biases."""
