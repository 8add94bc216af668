"""The base of every model in the contract: frozen, strict, with bounded types and rules between fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"

Path = Annotated[
    str,
    Field(min_length=1, max_length=1024, pattern=_ONE_LINE, title="a path of 1 to 1024 characters"),
]
OptionalPath = Annotated[
    Path | None, BeforeValidator(lambda value: None if value == "none" else value)
]
"""A path, or ``none``, which is null: a null in a file would be dropped on the way to a cluster."""
Label = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=_ONE_LINE, title="one line of 1 to 128 characters"),
]
Sha256 = Annotated[
    str,
    Field(
        min_length=64,
        max_length=64,
        pattern="^[0-9a-f]{64}$",
        title="a SHA-256 digest, 64 hexadecimal digits",
    ),
]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Immutable:
    """Marks a field that cannot change while the job exists: another value is another run."""


IMMUTABLE = Immutable()


@dataclass(frozen=True)
class Rule:
    """A validation rule between fields of a model, checked in Python and, as CEL, by the API server."""

    field: str
    """The field that the error names, as in the file; empty for the model itself."""
    message: str
    """What ``field`` must be, such as "must be a multiple of num_heads"."""
    holds: Callable[[Any], bool]
    """Returns whether a model obeys the rule."""
    cel: str
    """The CEL expression for ``holds``, in terms of ``self``, with the field names of the file."""
    others: tuple[str, ...] = ()
    """The other fields of the rule; the API server checks it only if all of them are set."""

    def explain(self, model: StrictModel) -> str:
        """Return the message with the values of the other fields in ``model``."""
        values = [f"{name} is {model.look_up(name)}" for name in self.others]
        return "; ".join([self.message, *values])


class BrokenRulesError(ValueError):
    """Some rules of one model do not hold; pydantic reports it with the path of the model."""

    def __init__(self, model: StrictModel, broken: list[Rule]) -> None:
        """Keep ``model`` and its ``broken`` rules for the message."""
        self.model, self.broken = model, broken
        super().__init__("; ".join(f"{rule.field} {rule.message}" for rule in broken))


class StrictModel(BaseModel):
    """A frozen model that refuses unknown fields and implicit conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule for rule in self.rules if not rule.holds(self)]
        if broken:
            raise BrokenRulesError(self, broken)
        return self

    def look_up(self, path: str) -> Any:
        """Return the value at ``path``, written with the names of the file."""
        return reduce(
            lambda model, name: getattr(model, model.attributes()[name]), path.split("."), self
        )

    @classmethod
    def attributes(cls) -> dict[str, str]:
        """Return the attribute of every field by its name in the file."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}
