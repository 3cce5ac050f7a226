"""The two passes of a running softmax over some scores, written out as LLVM instructions (see `product/tile.py`).

Lanes are counted from the first score on, so what is computed depends on the scores and their number alone.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from agentrt_kernels.compiled import declared
from agentrt_kernels.half import element
from agentrt_kernels.product.tile import INT, VECTOR, WIDTH, spread, vector_at

SPARE = WIDTH
"""Elements that must lie beyond the last score: whole vectors are read and written back."""

_LANES = ir.VectorType(ir.IntType(32), WIDTH)
_POLYNOMIAL = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1


def _typed_scale(typing: Any, x: Any, at: Any, count: Any, scale: Any, peak: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scale = spread(builder, args[3])

        def scaled(scores: Any, inside: Any, best: Any) -> tuple[Any, Any]:
            scores = builder.fmul(scores, scale)
            is_more = builder.and_(inside, builder.fcmp_ordered(">", scores, best))
            return scores, builder.select(is_more, scores, best)

        best = _over(context, builder, signature, args, spread(builder, args[4]), scaled)
        return _folded(builder, best, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(x, types.intp, types.intp, types.float32, types.float32), generate


def _typed_weigh(typing: Any, x: Any, at: Any, count: Any, peak: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        peak, zero = spread(builder, args[3]), ir.Constant(VECTOR, None)

        def weighed(scores: Any, inside: Any, total: Any) -> tuple[Any, Any]:
            weights = _exp(builder, builder.fsub(scores, peak))
            return weights, builder.fadd(total, builder.select(inside, weights, zero))

        return _folded(builder, _over(context, builder, signature, args, zero, weighed), builder.fadd)

    return types.float32(x, types.intp, types.intp, types.float32), generate


scale_scores: Callable[..., float] = intrinsic(_typed_scale)
"""`scale_scores(x, at, count, scale, peak)` scales some elements of a contiguous array; the largest of them and `peak`.

A NaN is passed over."""
weigh_scores: Callable[..., float] = intrinsic(_typed_weigh)
"""`weigh_scores(x, at, count, peak)` makes each element e^(element - peak), as `exp32` does; their sum."""


def _over(
    context: Any, builder: Any, signature: Any, args: Any, start: Any, work: Callable[..., tuple[Any, Any]]
) -> Any:
    """The loop over the vectors: `work(vector, which lanes count, what was found)` gives new elements and what is found."""
    before, loop, after = builder.block, builder.append_basic_block("vectors"), builder.append_basic_block("through")
    lanes = ir.Constant(_LANES, list(range(WIDTH)))
    builder.branch(loop)
    builder.position_at_end(loop)
    first, found = builder.phi(INT), builder.phi(VECTOR)
    place = vector_at(builder, element(context, builder, signature.args[0], args[0], builder.add(args[1], first)), 0)
    old = builder.load(place, align=4)
    left = builder.trunc(builder.sub(args[2], first), ir.IntType(32))
    inside = builder.icmp_signed("<", lanes, spread(builder, left))
    new, following = work(old, inside, found)
    builder.store(builder.select(inside, new, old), place, align=4)
    second = builder.add(first, INT(WIDTH))
    for phi, initial, later in ((first, INT(0), second), (found, start, following)):
        phi.add_incoming(initial, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", second, args[2]), loop, after)
    builder.position_at_end(after)
    return following


def _folded(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Its lanes joined, half by half."""
    distance = WIDTH // 2
    while distance:
        turned = ir.Constant(_LANES, [(lane + distance) % WIDTH for lane in range(WIDTH)])
        vector = join(vector, builder.shuffle_vector(vector, vector, turned))
        distance //= 2
    return builder.extract_element(vector, ir.IntType(32)(0))


def _exp(builder: Any, x: Any) -> Any:
    """As `exp32`."""

    def number(value: float) -> Any:
        return ir.Constant(VECTOR, [value] * WIDTH)

    def integer(value: int) -> Any:
        return ir.Constant(_LANES, [value] * WIDTH)

    fma, floor = (
        declared(builder, f"llvm.{name}.v{WIDTH}f32", VECTOR, *[VECTOR] * count)
        for name, count in (("fma", 3), ("floor", 1))
    )
    n = builder.call(floor, [builder.call(fma, [x, number(1.4426950408889634), number(0.5)])])
    r = builder.call(fma, [n, number(-0.693359375), x])
    r = builder.call(fma, [n, number(2.12194440e-4), r])
    p = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = builder.call(fma, [p, r, number(coefficient)])
    y = builder.fadd(builder.call(fma, [p, builder.fmul(r, r), r]), number(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, _LANES), integer(127)), integer(23))
    y = builder.fmul(y, builder.bitcast(exponent, VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, number(-87.0)), number(0.0), y)
