"""Numbers with units, as text."""

from __future__ import annotations

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def binary(num_bytes: int) -> str:
    """Return ``num_bytes`` in MiB or GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"


def decimal(number: float, unit: str) -> str:
    """Return ``number`` with four digits and a decimal prefix of ``unit``."""
    power = 0
    while number >= 1000 and power < len(_DECIMAL) - 1:
        number, power = number / 1000, power + 1
    return f"{number:,.4g} {_DECIMAL[power]}{unit}"
