"""What every group of fields shares: it is frozen, strict, bounded, and may state rules between fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_NO_CONTROL = r"^[^\x00-\x1f\x7f]+$"

Path = Annotated[str, Field(min_length=1, max_length=1024, pattern=_NO_CONTROL, examples=["train"])]
"""A file or folder; no control characters, so that it can be shown and logged as it is."""
Label = Annotated[
    str, Field(min_length=1, max_length=128, pattern=_NO_CONTROL, examples=["a word"])
]
"""A short text on one line."""
Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Fixed:
    """Marks a field whose change would make the run another run: it stays as it was created."""


FIXED = Fixed()


@dataclass(frozen=True)
class Rule:
    """One sentence about several fields of a section, said to Python and, as CEL, to the API server."""

    field: str
    """The field that is named in the error."""
    others: tuple[str, ...]
    """The other fields concerned; the API server applies the rule where all of them are given."""
    sentence: str
    """What ``field`` must be, such as "must be a multiple of num_heads"."""
    holds: Callable[[Any], bool]
    """Whether a section keeps the rule."""
    cel: str
    """The same as ``holds``, of ``self`` with the names that the file uses."""


class BrokenRulesError(ValueError):
    """Some rules of one section do not hold; pydantic passes it on with the section's path."""

    def __init__(self, section: Section, broken: list[Rule]) -> None:
        """Keep ``section`` and its ``broken`` rules for the message."""
        self.section, self.broken = section, broken
        super().__init__("; ".join(f"{rule.field} {rule.sentence}" for rule in broken))


class Section(BaseModel):
    """A frozen group of fields that refuses unknown names and silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = [rule for rule in self.rules if not rule.holds(self)]
        if broken:
            raise BrokenRulesError(self, broken)
        return self
