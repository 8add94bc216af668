"""Frozen text encoders and autoencoders."""
