"""The base of the models outside ``spec.run``, with camelCase names, and Kubernetes' string types."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from fluxtrain.contract.strict_model import StrictModel

GROUP = "fluxtrain.dev"
"""API group of the resource, and prefix of its labels and annotations."""

Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        min_length=1,
        max_length=63,
        title="a name of 1 to 63 lower-case letters, digits and '-', with no '-' at its ends",
    ),
]
Subdomain = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        max_length=253,
        title="a name of at most 253 lower-case letters, digits, '-' and '.'",
    ),
]
Image = Annotated[
    str,
    Field(
        pattern=r"^[!-~]+$",
        max_length=1024,
        title="an image of 1 to 1024 ASCII characters with no blanks",
    ),
]
Quantity = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
        max_length=32,
        title="a quantity such as 500Mi or 2Ti",
    ),
]
ResourceName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=128,
        title="an extended resource such as amd.com/gpu",
    ),
]
LabelValue = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
        max_length=63,
        title="a label's value: at most 63 letters, digits, '-', '_' and '.'",
    ),
]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=317,
        title="a label's key such as kubernetes.io/arch",
    ),
]
Seconds = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ApiModel(StrictModel):
    """A model whose fields have camelCase names in the file."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=False)
