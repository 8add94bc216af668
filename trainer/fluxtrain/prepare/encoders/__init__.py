"""Collects the frozen encoders below the models root, and verifies them."""
