"""The two passes of a running softmax over a line of scores, written out as LLVM instructions (see `product/tile.py`).

Scores are in powers of two, and a line is whole vectors: -inf stands where no score is, and becomes a weight of 0. Each lane
has its own total. So a line's bits are those of its scores and of where they lie in their vectors.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from agentrt_kernels.compiled import declared
from agentrt_kernels.half import element
from agentrt_kernels.product.tile import INT, VECTOR, WIDTH, spread, vector_at

LOG2_E = 1.4426950408889634

_LANES = ir.VectorType(ir.IntType(32), WIDTH)
_ROUNDER = 12582912.0
"""1.5 * 2^23: added to a number, it leaves the nearest integer in the sum's low bits."""
_LEAST = -126.0
"""Below this exponent a weight is 0."""
_POLYNOMIAL = 1.3218672e-3, 9.6716979e-3, 5.5508925e-2, 2.40222380e-1, 6.93146856e-1, 1.0
"""2^x within 2e-7 of it where |x| is at most 1/2 (least squares at Chebyshev points, 1 at 0), from the fifth power down."""


def _typed_largest(typing: Any, x: Any, at: Any, count: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def compared(place: Any, best: Any) -> Any:
            return _larger(builder, builder.load(place, align=4), best)

        lowest = ir.Constant(VECTOR, [float("-inf")] * WIDTH)
        best = _over(context, builder, signature, args, lowest, compared)
        distance = WIDTH // 2
        while distance:
            turned = ir.Constant(_LANES, [(lane + distance) % WIDTH for lane in range(WIDTH)])
            best = _larger(builder, builder.shuffle_vector(best, best, turned), best)
            distance //= 2
        return builder.extract_element(best, ir.IntType(32)(0))

    return types.float32(x, types.intp, types.intp), generate


def _typed_weigh(typing: Any, x: Any, at: Any, count: Any, peak: Any, totals: Any, total_at: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        peak = spread(builder, args[3])
        place = vector_at(builder, element(context, builder, signature.args[4], args[4], args[5]), 0)

        def weighed(place: Any, total: Any) -> Any:
            weights = _exp2(builder, builder.fsub(builder.load(place, align=4), peak))
            builder.store(weights, place, align=4)
            return builder.fadd(total, weights)

        builder.store(_over(context, builder, signature, args, builder.load(place, align=4), weighed), place, align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.float32, totals, types.intp), generate


largest: Callable[..., float] = intrinsic(_typed_largest)
"""`largest(x, at, count)` is the largest of some elements of a contiguous array, in whole vectors. A NaN is passed over."""
weigh: Callable[..., None] = intrinsic(_typed_weigh)
"""`weigh(x, at, count, peak, totals, total_at)` makes each such element 2^(element - peak), and adds it to its lane's total.

No element may be above `peak`."""


def _over(context: Any, builder: Any, signature: Any, args: Any, start: Any, work: Callable[[Any, Any], Any]) -> Any:
    """The loop over the vectors: `work(place, what was found)` gives what is found."""
    before, loop, after = builder.block, builder.append_basic_block("vectors"), builder.append_basic_block("through")
    builder.branch(loop)
    builder.position_at_end(loop)
    first, found = builder.phi(INT), builder.phi(VECTOR)
    place = vector_at(builder, element(context, builder, signature.args[0], args[0], builder.add(args[1], first)), 0)
    following = work(place, found)
    second = builder.add(first, INT(WIDTH))
    for phi, initial, later in ((first, INT(0), second), (found, start, following)):
        phi.add_incoming(initial, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", second, args[2]), loop, after)
    builder.position_at_end(after)
    return following


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp2(builder: Any, x: Any) -> Any:
    """2^x of numbers that are at most 0: that of the nearest integer by its bits, of the rest by a polynomial."""

    def number(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * WIDTH)

    def integer(value: int) -> Any:
        return ir.Constant(_LANES, [value] * WIDTH)

    fma = declared(builder, f"llvm.fma.v{WIDTH}f32", VECTOR, *[VECTOR] * 3)
    rounded = builder.fadd(x, number(_ROUNDER))
    rest = builder.fsub(x, builder.fsub(rounded, number(_ROUNDER)))
    y = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y = builder.call(fma, [y, rest, number(coefficient)])
    exponent = builder.shl(builder.bitcast(rounded, _LANES), integer(23))
    y = builder.fmul(y, builder.bitcast(builder.add(exponent, integer(127 << 23)), VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, number(_LEAST)), number(0.0), y)
