"""Places of nodes, such as racks, as the operator tells them to the rendezvous service: one argument.

Whoever may read a job's pods need not know the cluster's nodes and their labels. So the argument only has the
digests of nodes' names, ``DIGEST,DIGEST;DIGEST``: those of one place, then those of the next one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

MAX_BYTES = 96 << 10
"""Of the argument; Linux allows 128 KiB."""
_DIGITS = 12
_ARGUMENT = re.compile(rf"(?:[0-9a-f]{{{_DIGITS}}}(?:[,;](?=[0-9a-f])|$))*")


def write_places(places: Mapping[str, str]) -> str:
    """Return the argument with the order of nodes' places, which are given by the nodes' names.

    Nodes without a place are left out, and the last ones if there are too many.
    """
    digests_of = dict[str, list[str]]()
    located = [(node, place) for node, place in places.items() if place]
    for node, place in located[: MAX_BYTES // (_DIGITS + 1)]:
        digests_of.setdefault(place, []).append(_digest(node))
    return ";".join(",".join(digests_of[place]) for place in sorted(digests_of, key=natural))


def read_places(text: str) -> dict[str, int]:
    """Return the numbers of nodes' places, by digest; ValueError if ``text`` is not from `write_places`."""
    if len(text) > MAX_BYTES or not _ARGUMENT.fullmatch(text):
        raise ValueError(f"got {text[:100]!r}; must be at most {MAX_BYTES} bytes of digests")
    groups = enumerate(text.split(";"))
    return {digest: number for number, group in groups for digest in group.split(",") if digest}


def place_of(node: str, places: Mapping[str, int]) -> int | None:
    """Return the number of the place of ``node``; None if it is not known."""
    return places.get(_digest(node)) if places else None


def natural(text: str) -> list[str | int]:
    """Return ``text`` as it sorts: numbers by their value, so that job-2 precedes job-10."""
    parts = re.split("([0-9]+)", text)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _digest(node: str) -> str:
    return hashlib.sha256(node.encode()).hexdigest()[:_DIGITS]
