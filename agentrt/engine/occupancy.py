"""How many pages sequences hold as time goes on: the loops of `engine.forecast`, compiled.

A sequence is a row of three: its ids now, the ids it still gains, one a step, and the steps until it begins to. Its pages are
free once it has them all. Rows of those that run come first, then those that return from a tool, in order of their return.
Whole numbers are divided as floats, which is exact below 2^53, and faster.
"""

from math import ceil
from typing import Any

import numpy as np

from agentrt_kernels.compiled import inner, ordered


@inner()
def _pages(row_3: Any, at: Any, page_size: Any) -> Any:
    """Of one sequence at a time; nothing once it has ended."""
    tokens, steps, delay = row_3
    if at > delay + steps:
        return 0
    return ceil((tokens + min(max(at - delay, 0), steps)) / page_size)


@ordered()
def at_most(rows_S3: Any, page_size: Any) -> Any:
    """Pages if all of them ended at one time."""
    pages = 0
    for s in range(len(rows_S3)):
        pages += ceil((rows_S3[s, 0] + rows_S3[s, 1]) / page_size)
    return pages


@ordered()
def at_ends(rows_S3: Any, num_running: Any, page_size: Any) -> Any:
    """At the end of each: pages of all that run and of the first 0, 1, 2 ... that return."""
    count = len(rows_S3)
    pages_SB = np.empty((count, count - num_running + 1), np.int64)
    for s in range(count):
        end, pages = rows_S3[s, 1] + rows_S3[s, 2], 0
        for other in range(num_running):
            pages += _pages((rows_S3[other, 0], rows_S3[other, 1], rows_S3[other, 2]), end, page_size)
        pages_SB[s, 0] = pages
        for other in range(num_running, count):
            pages += _pages((rows_S3[other, 0], rows_S3[other, 1], rows_S3[other, 2]), end, page_size)
            pages_SB[s, other - num_running + 1] = pages
    return pages_SB


@ordered()
def peak(rows_S3: Any, pages_SB: Any, num_running: Any, back: Any, newcomer_3: Any, page_size: Any) -> Any:
    """The most pages at one time of those that run, with a newcomer and the first `back` that return until it ends.

    `pages_SB` is of `at_ends`. It is reached just before some sequence ends.
    """
    end = newcomer_3[1] + newcomer_3[2]
    most = _pages(newcomer_3, end, page_size)
    for s in range(num_running + back):
        most += _pages((rows_S3[s, 0], rows_S3[s, 1], rows_S3[s, 2]), end, page_size)
    for s in range(len(rows_S3)):
        at = rows_S3[s, 1] + rows_S3[s, 2]
        pages = pages_SB[s, back] + _pages(newcomer_3, at, page_size) if at <= end else pages_SB[s, 0]
        most = max(most, pages)
    return most


@ordered()
def growths(counts_4N: Any, count: Any, step: Any, lengths_T: Any, quantile: Any, reserve_after: Any) -> Any:
    """Rows of the first `count` columns: the ids that each knows and those of its turn, both without the last `step`, the most
    that its turn may have, and how often it was preempted.

    A turn is taken to become as long as the quantile of the longer ones of `lengths_T`, in order, says, and as it may where
    there are none, or where it was preempted that often.
    """
    rows_S3 = np.zeros((count, 3), np.int64)
    for s in range(count):
        sampled, most = counts_4N[1, s] + step, counts_4N[2, s]
        left = most - sampled
        if counts_4N[3, s] < reserve_after:
            left, first = max(left, 1), np.searchsorted(lengths_T, sampled, "right")
            if first < len(lengths_T):
                length = lengths_T[first + int(quantile * (len(lengths_T) - first - 1))]
                left = min(length - sampled, left)
        rows_S3[s, 0], rows_S3[s, 1] = counts_4N[0, s] + step, max(left, 0)
    return rows_S3
