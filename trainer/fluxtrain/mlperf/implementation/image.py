"""The image of the runs by its digest, and the Dockerfile of a package."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf.evidence import Run
from fluxtrain.mlperf.implementation.software import Software
from fluxtrain.mlperf.ran_job import read_ran_job

_DIGEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
_OPTION = "--image"
_HOW = "the imageID in the status of the run's pods: kubectl get pod NAME -o yaml"


def fetched_image(runs: Sequence[Run]) -> str | None:
    """Return the image of all ``runs`` if they were fetched from a cluster that told it by its digest.

    Raises ConfigError if they were in different ones.
    """
    jobs = [read_ran_job(run.log.parent) for run in runs]
    images = {str(job["spec"].get("image")) for job in jobs if job is not None}
    found = sorted(image for image in images if _DIGEST.fullmatch(image))
    if len(found) > 1:
        text = f"the runs were in different images: {', '.join(found)}"
        raise ConfigError(_OPTION, UNSET, text)
    return found[0] if found else None


def find_image(given: str | None, software: Software, closed: bool) -> str | None:
    """Return the ``given`` image, None if the runs were in no container or, if open, it is unknown.

    Raises ConfigError if it is not given by its digest, or missing in the closed division.
    """
    if given is None:
        if software.in_container and closed:
            text = (
                f"missing: the runs were in a container; needed: REPOSITORY@sha256:DIGEST ({_HOW})"
            )
            raise ConfigError(_OPTION, UNSET, text)
        return None
    image = given.removeprefix("docker-pullable://")  # of the status of pods on Docker
    if not _DIGEST.fullmatch(image):
        text = f"must be REPOSITORY@sha256:DIGEST, as tags can be moved ({_HOW})"
        raise ConfigError(_OPTION, given, text)
    return image


def dockerfile(software: Software, image: str | None) -> str:
    """Return a Dockerfile of what ran: from ``image``, or from Python and the packages of the runs."""
    commit = software.revision or "unknown"
    label = f"LABEL org.opencontainers.image.revision={commit}"
    if image is not None:
        return "\n".join(
            [
                "# The image that ran, by its digest, with this folder in it.",
                f"# It was built by images/trainer.Dockerfile of fluxtrain, commit {commit}.",
                f"FROM {image}",
                "COPY . /implementation",
                label,
                "ENTRYPOINT []",
                'CMD ["/implementation/run_and_time.sh"]',
                "",
            ]
        )
    known = "was not in a container" if not software.in_container else "is not known by its digest"
    return "\n".join(
        [
            f"# What ran {known}. This image has the same Python and packages.",
            "# Torch for GPUs is not in pip's default index: --build-arg PIP_OPTIONS=--index-url=...",
            f"FROM python:{software.python}-slim",
            'ARG PIP_OPTIONS=""',
            "COPY requirements.txt /tmp/",
            "RUN pip install --no-cache-dir ${PIP_OPTIONS} --no-deps --requirement /tmp/requirements.txt",
            "COPY . /implementation",
            label,
            'CMD ["/implementation/run_and_time.sh"]',
            "",
        ]
    )
