"""Whether a request can ever be served, said before it is queued: one sentence with the field and the numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentrt.core.errors import RequestError
from agentrt.core.spec import SamplingParams


class Bounds(NamedTuple):
    """What an engine can serve."""

    vocab_size: int
    context_length: int
    kv_tokens: int
    """Ids that fit the page pool."""


def check_request(
    observed_ids: Sequence[int], held: int, params: SamplingParams, max_tokens: int, bounds: Bounds
) -> None:
    """Raise `RequestError` unless `observed_ids` after `held` ids, and up to `max_tokens` more, can be served."""
    context = held + len(observed_ids)
    if context == 0:
        raise RequestError("observed_ids is empty and the session has no ids yet: there is nothing to continue")
    check_ids("observed_ids", observed_ids, bounds)
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; it must be 1 or more")
    if params.min_tokens > max_tokens:
        raise RequestError(f"sampling.min_tokens ({params.min_tokens}) is above max_tokens ({max_tokens})")
    bad_words = [token_id for word in params.bad_words for token_id in word]
    for name, ids in (
        ("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids), ("bad_words", bad_words)
    ):  # fmt: skip
        for token_id in ids:
            if not 0 <= token_id < bounds.vocab_size:
                raise RequestError(f"sampling.{name} names id {token_id}; ids are 0 to {bounds.vocab_size - 1}")
    if context + max_tokens > bounds.context_length:
        raise RequestError(
            f"context ({context} ids) and max_tokens ({max_tokens}) exceed the model's context of {bounds.context_length}"
        )
    if context + max_tokens > bounds.kv_tokens:
        raise RequestError(
            f"context ({context} ids) and max_tokens ({max_tokens}) exceed engine.kv_tokens ({bounds.kv_tokens}); raise it"
        )


def check_ids(name: str, ids: Sequence[int], bounds: Bounds) -> None:
    """Raise `RequestError` unless the model knows all `ids`; `name` is what they are in the message."""
    ids_N = np.asarray(ids)
    if len(ids_N) and not (ids_N.min() >= 0 and ids_N.max() < bounds.vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < bounds.vocab_size)
        raise RequestError(f"{name} holds {wrong}, and this model's ids are 0 to {bounds.vocab_size - 1}")
