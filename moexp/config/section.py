"""The base of every section of a recipe, and the kinds of numbers that fields take.

A section is a frozen model, each field with its default and its unit. A string is never taken for a number (`strict`),
and an unknown name is an error (`extra="forbid"`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
DType = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """Base of every section: immutable, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
