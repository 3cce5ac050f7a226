"""The innermost loops of products, written out as LLVM instructions: a few rows times one panel, and a transposition.

numba turns plain loops into vector code by guessing; here nothing is left to guess. A tile keeps all of its sums in
registers, reads each weight once, and takes the terms of every sum in their order, one fused multiply and add each. So
an element has the same bits whatever tile it is computed in. LLVM writes the instructions of the machine at hand.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from agentrt_kernels.compiled import declared
from agentrt_kernels.half import element, is_half

PANEL = 16
"""Columns (outputs) of a panel."""
WIDTH = 8
"""Floats of a vector: of AVX2's registers, and two of NEON's."""
MOST_ROWS = 6
"""Rows of a tile at most: 6 x 2 sums, two weights and a row's element fit the 16 registers."""

TERMS = 4
"""Of float16, in a pass: they share what a pass costs beside its multiplications. More of float32 ran out of registers."""

INT, FLOAT = ir.IntType(64), ir.FloatType()
VECTOR, _HALVES = ir.VectorType(FLOAT, WIDTH), ir.VectorType(ir.HalfType(), WIDTH)


def make_tile(rows: int, *, panels: int = 1, adds: bool = False) -> Callable[..., None]:
    """`tile(x, x_at, x_stride, panel, panel_at, panel_stride, depth, out, out_at, out_stride, ahead, step)`, for compiled code.

    It works on so many rows. `x`, `panel` and `out` are contiguous arrays; places and strides count elements. `depth`
    terms, at least one, are summed, on top of what `out` has if the tile `adds`. The columns of a panel lie next to one
    another, those of the next term `panel_stride` further on. A panel of float16 has its bits as uint16. With more than one
    of the `panels`, each begins where the one before ends; a single row needs several, or it waits for its own sums.
    `ahead` in `panel` moves on by `step` with each term, and the memory there is read to the second-level cache, once for the
    terms that share a line; a tile that `adds`, or of several panels, does not look at the two.
    """

    @intrinsic
    def tile(
        typing: Any, x: Any, x_at: Any, x_stride: Any, panel: Any, panel_at: Any, panel_stride: Any, depth: Any, out: Any,
        out_at: Any, out_stride: Any, ahead: Any, step: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(x, *[types.intp] * 2, panel, *[types.intp] * 3, out, *[types.intp] * 4)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_at, x_stride, panel_at, panel_stride, depth, out_at, out_stride = (args[i] for i in (1, 2, 4, 5, 6, 8, 9))
            x, panel, out = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3, 7))
            inputs = [_place(builder, x, x_at, x_stride, row) for row in range(rows)]
            targets = [
                [
                    vector_at(builder, _place(builder, out, out_at, out_stride, row), vector)
                    for vector in range(panels * PANEL // WIDTH)
                ]
                for row in range(rows)
            ]
            zero = ir.Constant(VECTOR, None)
            before = [[builder.load(place, align=4) if adds else zero for place in row] for row in targets]
            size = builder.mul(depth, panel_stride)
            begins = [_place(builder, panel, panel_at, size, place) for place in range(panels)]
            ahead = (builder.gep(panel, [args[10]]), args[11]) if panels == 1 and not adds else None
            after = _loop(builder, inputs, begins, panel_stride, depth, is_half(signature.args[3]), before, ahead)
            for places, sums in zip(targets, after, strict=True):
                for place, total in zip(places, sums, strict=True):
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        return signature, generate

    found: Callable[..., None] = tile
    return found


def _transpose(typing: Any, x: Any, x_at: Any, x_stride: Any, out: Any, out_at: Any, out_stride: Any) -> Any:
    signature = types.void(x, *[types.intp] * 2, out, *[types.intp] * 2)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3))
        places = [_place(builder, x, args[1], args[2], row) for row in range(8)]
        rows = [_load(builder, place, 0, is_half(signature.args[0])) for place in places]
        for distance in (1, 2, 4):  # swap the blocks of this size that lie off the diagonal
            for row in (row for row in range(8) if not row & distance):
                pair = rows[row], rows[row + distance]
                for which in (0, 1):
                    lanes = [lane if not lane & distance else lane - distance + 8 for lane in range(8)]
                    rows[row + which * distance] = _shuffle(builder, *pair, [lane + which * distance for lane in lanes])
        for row in range(8):
            builder.store(rows[row], vector_at(builder, _place(builder, out, args[4], args[5], row), 0), align=4)
        return context.get_dummy_value()

    return signature, generate


transpose: Callable[..., None] = intrinsic(_transpose)
"""`transpose(x, x_at, x_stride, out, out_at, out_stride)` writes 8 rows of 8 floats as 8 columns, for compiled code.

`x` may be of float16, in its bits; `out` is of float32.
"""


def _prefetch(typing: Any, x: Any, x_at: Any) -> Any:
    signature = types.void(x, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _read_ahead(builder, element(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return signature, generate


prefetch: Callable[..., None] = intrinsic(_prefetch)
"""`prefetch(x, x_at)` has the line of memory of that element read to the second-level cache, for compiled code."""


def _read_ahead(builder: Any, place: Any) -> None:
    number = ir.IntType(32)
    kinds = ir.IntType(8).as_pointer(), number, number, number
    call = declared(builder, "llvm.prefetch.p0", ir.VoidType(), *kinds)
    builder.call(call, [builder.bitcast(place, kinds[0]), number(0), number(2), number(1)])


def _loop(
    builder: Any, inputs: list[Any], panels: list[Any], panel_stride: Any, depth: Any, halves: bool,
    start: list[list[Any]], ahead: tuple[Any, Any] | None,
) -> list[list[Any]]:  # fmt: skip
    """The loops over the terms, `TERMS` in a pass and then what is left; they leave two vectors of sums a row and panel."""
    whole = INT(0)
    if halves:
        whole = builder.and_(depth, INT(-TERMS))
        start = _terms(builder, inputs, panels, panel_stride, (INT(0), whole), TERMS, halves, start, ahead)
    return _terms(builder, inputs, panels, panel_stride, (whole, depth), 1, halves, start, ahead)


def _terms(
    builder: Any, inputs: list[Any], panels: list[Any], panel_stride: Any, reach: tuple[Any, Any], at_once: int,
    halves: bool, start: list[list[Any]], ahead: tuple[Any, Any] | None,
) -> list[list[Any]]:  # fmt: skip
    """The loop over the terms from the first of `reach` to the second, so many in each pass."""
    before, head = builder.block, builder.append_basic_block("head")
    body, after = builder.append_basic_block("terms"), builder.append_basic_block("summed")
    builder.branch(head)
    builder.position_at_end(head)
    term = builder.phi(INT)
    phis = [[builder.phi(VECTOR) for _ in row] for row in start]
    builder.cbranch(builder.icmp_signed("<", term, reach[1]), body, after)
    builder.position_at_end(body)
    multiply_add = declared(builder, f"llvm.fma.v{WIDTH}f32", VECTOR, *[VECTOR] * 3)
    sums: list[list[Any]] = [list(row) for row in phis]
    for one in range(at_once):
        here = builder.add(term, INT(one))
        columns = [builder.gep(panel, [builder.mul(here, panel_stride)]) for panel in panels]
        if ahead is not None and not one % (2 if halves else 1):
            _read_ahead(builder, builder.gep(ahead[0], [builder.mul(here, ahead[1])]))
        weights = [_load(builder, column, vector, halves) for column in columns for vector in range(PANEL // WIDTH)]
        for row, place in enumerate(inputs):
            x = spread(builder, builder.load(builder.gep(place, [here])))
            for vector, weight in enumerate(weights):
                sums[row][vector] = builder.call(multiply_add, [x, weight, sums[row][vector]])
    following = builder.add(term, INT(at_once))
    builder.branch(head)
    term.add_incoming(reach[0], before)
    term.add_incoming(following, body)
    for places, first, last in zip(phis, start, sums, strict=True):
        for phi, initial, later in zip(places, first, last, strict=True):
            phi.add_incoming(initial, before)
            phi.add_incoming(later, body)
    builder.position_at_end(after)
    return phis


def _load(builder: Any, place: Any, vector: int, halves: bool) -> Any:
    """A vector of floats, or of float16 as floats."""
    if not halves:
        return builder.load(vector_at(builder, place, vector), align=4)
    place = builder.bitcast(builder.gep(place, [INT(vector * WIDTH)]), _HALVES.as_pointer())
    return builder.fpext(builder.load(place, align=2), VECTOR)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def vector_at(builder: Any, place: Any, vector: int) -> Any:
    return builder.bitcast(builder.gep(place, [INT(vector * WIDTH)]), VECTOR.as_pointer())


def spread(builder: Any, x: Any) -> Any:
    """A vector of the same number throughout."""
    empty, lanes = ir.Constant(ir.VectorType(x.type, WIDTH), ir.Undefined), ir.VectorType(ir.IntType(32), WIDTH)
    first = builder.insert_element(empty, x, ir.IntType(32)(0))
    return builder.shuffle_vector(first, empty, ir.Constant(lanes, None))


def _place(builder: Any, array: Any, start: Any, stride: Any, row: int) -> Any:
    return builder.gep(array, [builder.add(start, builder.mul(stride, INT(row)))])


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data
