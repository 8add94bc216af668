"""spec.resources: CPU and memory of the training container, and the size of its shared memory."""

from __future__ import annotations

from decimal import Decimal
from typing import ClassVar

from fluxtrain.contract.resource.api_model import ApiModel, Quantity
from fluxtrain.contract.strict_model import Rule

_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTP", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTP", 1)},
}


def amount(quantity: str) -> Decimal:
    """Return the value of a Kubernetes quantity, such as 0.5 for 500m; it must match `Quantity`."""
    number = quantity.rstrip("mkMGTPKi")
    return Decimal(number) * _SUFFIXES[quantity.removeprefix(number)]


class Amounts(ApiModel):
    """Amounts of CPU and memory."""

    cpu: Quantity | None = None
    """CPUs, such as "16" or 500m."""
    memory: Quantity | None = None
    """Memory, such as 256Gi."""


def _at_most_the_limit(name: str) -> Rule:
    return Rule(
        f"requests.{name}",
        "must be at most the limit",
        lambda resources: _fits(resources, name),
        f"quantity(self.requests.{name}).compareTo(quantity(self.limits.{name})) <= 0",
        others=(f"limits.{name}",),
    )


def _fits(resources: Resources, name: str) -> bool:
    request, limit = getattr(resources.requests, name), getattr(resources.limits, name)
    return request is None or limit is None or amount(request) <= amount(limit)


class Resources(ApiModel):
    """CPU and memory of the training container; its GPUs are ``spec.gpusPerNode``."""

    rules: ClassVar = (_at_most_the_limit("cpu"), _at_most_the_limit("memory"))

    requests: Amounts = Amounts()
    """Requests; unset ones are the limit, or 2 CPUs and 8Gi per GPU and the memory of snapshots; "0" requests
    nothing."""
    limits: Amounts = Amounts()
    """Limits; unset ones are unlimited. Shared memory and snapshots in memory count as memory."""
    shared_memory: Quantity | None = None
    """Maximum size of /dev/shm; if unset, computed from the batches that the data loaders keep in it."""
