"""The folder of a package with what is needed to repeat its runs, made from what their nodes reported."""

from fluxtrain.mlperf.implementation.deviations import parse_reasons, summary
from fluxtrain.mlperf.implementation.folder import Statements, run_deviations, write_implementation
from fluxtrain.mlperf.implementation.image import fetched_image, find_image
from fluxtrain.mlperf.implementation.software import Software, ran_software

__all__ = [
    "Software",
    "Statements",
    "fetched_image",
    "find_image",
    "parse_reasons",
    "ran_software",
    "run_deviations",
    "summary",
    "write_implementation",
]
