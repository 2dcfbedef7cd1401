"""What a value of the configuration must be, whatever its key is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Some keys of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def check_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Return ``value``.

        Raises:
            ValueError: a truth value in place of a number, or a table that cannot be recorded.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError("Input should be a number")
        if get_origin(annotation) is dict and isinstance(value, Mapping):
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"must hold texts and finite numbers alone ({error})") from error
        return value
