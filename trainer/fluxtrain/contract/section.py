"""What every group of fields shares: it is frozen, strict and bounded, and may state rules between fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"

Path = Annotated[
    str,
    Field(min_length=1, max_length=1024, pattern=_ONE_LINE, title="a path of 1 to 1024 characters"),
]
Label = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=_ONE_LINE, title="one line of 1 to 128 characters"),
]
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
    """One sentence about fields of a section, said to Python and, in CEL, to the API server."""

    field: str
    """The field that the error names, as the file writes it; empty: the section itself."""
    others: tuple[str, ...]
    """The other fields concerned; the API server applies the rule where all of them are given."""
    sentence: str
    """What ``field`` must be, such as "must be a multiple of num_heads"."""
    holds: Callable[[Any], bool]
    """Whether a section keeps the rule."""
    cel: str
    """The same as ``holds``, of ``self`` and with the names of the file."""

    def explain(self, section: Section) -> str:
        """Return the sentence with the values that the other fields have in ``section``."""
        values = [f"{name} is {section.look_up(name)}" for name in self.others]
        return "; ".join([self.sentence, *values])


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

    def look_up(self, path: str) -> Any:
        """Return the value at ``path``, whose names are those of the file."""
        return reduce(
            lambda section, name: getattr(section, section.attribute(name)), path.split("."), self
        )

    @classmethod
    def attribute(cls, name: str) -> str:
        """Return the Python name of the field that the file calls ``name``."""
        fields = cls.model_fields.items()
        return next(known for known, field in fields if name == (field.alias or known))

    @classmethod
    def file_names(cls) -> list[str]:
        """Return the names of the fields, as the file writes them."""
        return [field.alias or name for name, field in cls.model_fields.items()]
