"""Single elements of arrays that hold float32, or float16 as its bits (uint16), for compiled code.

numba computes in no float16; the processor's conversions are LLVM's. What float16 cannot hold becomes NaN, not infinity:
an infinite key could hide behind a weight of 0, and a NaN shows in everything that looks at it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from agentrt_kernels.compiled import declared

BEYOND = 65520.0
"""The least magnitude that rounds to more than float16's largest number, 65504."""

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()


def _typed_read(typing: Any, x: Any, at: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = element(context, builder, signature.args[0], args[0], args[1])
        if not is_half(signature.args[0]):
            return builder.load(place, align=4)
        return builder.fpext(builder.load(builder.bitcast(place, _HALF.as_pointer()), align=2), _FLOAT)

    return types.float32(x, types.intp), generate


def _typed_write(typing: Any, out: Any, at: Any, value: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, value = element(context, builder, signature.args[0], args[0], args[1]), args[2]
        if not is_half(signature.args[0]):
            builder.store(value, place, align=4)
        else:
            size = builder.call(declared(builder, "llvm.fabs.f32", _FLOAT, _FLOAT), [value])
            holds = builder.fcmp_ordered("<", size, _FLOAT(BEYOND))
            rounded = builder.select(holds, builder.fptrunc(value, _HALF), _HALF(float("nan")))
            builder.store(rounded, builder.bitcast(place, _HALF.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.float32), generate


def is_half(kind: Any) -> bool:
    """Whether an array of this numba type holds float16."""
    return bool(kind.dtype == types.uint16)


def element(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """The place of a contiguous array's element, counted through all of its dimensions."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


read: Callable[..., float] = intrinsic(_typed_read)
"""`read(x, at)` is the element at a place of a contiguous array, as float32."""
write: Callable[..., None] = intrinsic(_typed_write)
"""`write(out, at, value)` rounds a float32 to the array's type, to the nearest and of two to the even one."""
