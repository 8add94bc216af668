"""Data sets that a command makes."""

from fluxtrain.prepare.openmoji import prepare_openmoji

__all__ = ["prepare_openmoji"]
