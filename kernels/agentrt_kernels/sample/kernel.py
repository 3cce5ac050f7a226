"""The two parts of the sampling law that torch has no operation for, as Triton kernels in float64.

`cut_kernel` keeps the first ids of a row's ranking without sorting it: a search over weights, each pass of which reads
the row once and ends at a weight that is there. `race_kernel` is the exponential race.
"""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def cut_kernel(w_BV, counts_B, masses_B, kept_B, vocab, BLOCK: tl.constexpr):
    """Keep a row's ids, heaviest first and lower ids first among equals: at most a count, and until a mass stands
    before an id. Weights of the others become 0; the mass kept goes to `kept_B`. A program is one row.
    """
    row = tl.program_id(0).to(tl.int64)
    w_V = w_BV + row * vocab
    count, mass = tl.load(counts_B + row), tl.load(masses_B + row)
    if (count >= vocab) & (mass == float("inf")):
        return
    v = tl.arange(0, BLOCK)

    # The cut is the least weight that is there with fewer than `count` ids and less than `mass` above it.
    low_lanes = tl.full([BLOCK], float("inf"), tl.float64)
    high_lanes = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        w = tl.load(w_V + start + v, mask=start + v < vocab, other=0.0)
        low_lanes = tl.minimum(low_lanes, tl.where(w > 0.0, w, float("inf")))
        high_lanes = tl.maximum(high_lanes, w)
    low, high = tl.min(low_lanes, axis=0), tl.max(high_lanes, axis=0)
    while low < high:
        # Halfway between the numbers' bits, which is about halfway between their logarithms; below `high`.
        middle = (
            low.to(tl.int64, bitcast=True) + (high.to(tl.int64, bitcast=True) - low.to(tl.int64, bitcast=True)) // 2
        ).to(tl.float64, bitcast=True)
        above_lanes = tl.zeros([BLOCK], tl.int64)
        mass_lanes = tl.zeros([BLOCK], tl.float64)
        next_up_lanes = tl.full([BLOCK], float("inf"), tl.float64)
        next_down_lanes = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab, BLOCK):
            w = tl.load(w_V + start + v, mask=start + v < vocab, other=0.0)
            is_above = w > middle
            above_lanes += is_above.to(tl.int64)
            mass_lanes += tl.where(is_above, w, 0.0)
            next_up_lanes = tl.minimum(next_up_lanes, tl.where(is_above, w, float("inf")))
            next_down_lanes = tl.maximum(next_down_lanes, tl.where(is_above, 0.0, w))
        fits = (tl.sum(above_lanes, axis=0) < count) & (tl.sum(mass_lanes, axis=0) < mass)
        high = tl.where(fits, tl.max(next_down_lanes, axis=0), high)
        low = tl.where(fits, low, tl.min(next_up_lanes, axis=0))

    above_lanes = tl.zeros([BLOCK], tl.int64)
    mass_lanes = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        w = tl.load(w_V + start + v, mask=start + v < vocab, other=0.0)
        above_lanes += (w > high).to(tl.int64)
        mass_lanes += tl.where(w > high, w, 0.0)
    above, mass_above = tl.sum(above_lanes, axis=0), tl.sum(mass_lanes, axis=0)
    tied = above * 0
    kept_lanes = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        w = tl.load(w_V + start + v, mask=start + v < vocab, other=0.0)
        is_tied = ((w == high) & (w > 0.0)).to(tl.int64)
        before = tied + tl.cumsum(is_tied, axis=0) - is_tied
        stays = (is_tied > 0) & (above + before < count) & (mass_above + before.to(tl.float64) * high < mass)
        w = tl.where((w > high) | stays, w, 0.0)
        tl.store(w_V + start + v, w, mask=start + v < vocab)
        kept_lanes += w
        tied += tl.sum(is_tied, axis=0)
    tl.store(kept_B + row, tl.sum(kept_lanes, axis=0))


@triton.jit
def race_kernel(
    w_BV,
    seeds_B,
    positions_B,
    speeds_BC,
    ids_BC,
    vocab,
    BLOCK: tl.constexpr,
):
    """The fastest id of a stretch of a row, argmax w / E, and its speed; the lower id among equals."""
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = stretch * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_BV + row * vocab + v, mask=v < vocab, other=0.0)
    best, winner = tl.max(w, axis=0) * 0.0, stretch * BLOCK
    if tl.max(w, axis=0) > 0.0:
        none = tl.zeros([BLOCK], tl.uint32)
        position = none + tl.load(positions_B + row).to(tl.uint32)
        a, b, c, d = tl.philox(tl.load(seeds_B + row), (v // 4).to(tl.uint32), position, none, none)
        bits = tl.where(v % 4 == 0, a, tl.where(v % 4 == 1, b, tl.where(v % 4 == 2, c, d)))
        speeds = w / -tl.log(((bits >> 8).to(tl.float64) + 0.5) / 16777216.0)
        best = tl.max(speeds, axis=0)
        winner = tl.min(tl.where(speeds == best, v, vocab), axis=0)
    place = row * tl.num_programs(1) + stretch
    tl.store(speeds_BC + place, best)
    tl.store(ids_BC + place, winner)
