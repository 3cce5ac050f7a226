"""The JSON schemas of tools' arguments, checked by the `jsonschema` library."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import msgspec


def validator(schema: Mapping[str, Any]) -> Any:
    """The library's validator of a schema, by the draft that it names. It is made once: a schema is asked with every call."""
    return _validator(msgspec.json.encode(schema))


@lru_cache(maxsize=256)
def _validator(encoded: bytes) -> Any:
    from jsonschema.validators import extend, validator_for  # here, because it takes 0.2 s and only calls need it

    schema = msgspec.json.decode(encoded)
    return extend(validator_for(schema), {"multipleOf": _multiple_of})(schema)


def _multiple_of(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """The library's own divides floats: it raises for an integer that is none, and 0.3 is no multiple of 0.1 there."""
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError(f"{value} is not a multiple of {divisor}")
