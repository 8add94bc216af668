"""The FLUX.1 transformer, its initial weights and its cost."""
