"""The error of a release that cannot be made, or is not what was signed."""

from __future__ import annotations


class ReleaseError(Exception):
    """What is wrong with a release, in one line."""
