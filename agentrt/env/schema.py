"""The JSON schemas of tools' arguments, checked by the `jsonschema` library."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec


def validator(schema: Mapping[str, Any]) -> Any:
    """The library's validator of a schema, by the draft that it names. It is made once: a schema is asked with every call."""
    return _validator(msgspec.json.encode(schema))


@lru_cache(maxsize=256)
def _validator(encoded: bytes) -> Any:
    from jsonschema.validators import validator_for  # here, because it takes 0.2 s and only calls need it

    schema = msgspec.json.decode(encoded)
    return validator_for(schema)(schema)
