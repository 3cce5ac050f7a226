"""All layers of a decoder in one call: the compiled operations in their order, dealt among threads phase by phase.

Between two operations no thread returns to the interpreter: at one row that costs as much as the operations, and beside
a busy event loop more. The definition is the same operations called one by one (`Decoder.forward` with `reference`).

Suffixes beyond the operations' own: L layers, G cache groups, A kinds of rotary angles, E and F as in `rotary` and
`swiglu`. Arrays that a product writes are as wide as its panels (`padded_width`), those it reads as wide as its depth.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrt_kernels.compiled import inner, ordered, threads_for, together
from agentrt_kernels.deal import finish, new_counters, take, wait
from agentrt_kernels.geglu.cpu import geglu_row
from agentrt_kernels.paged_attention.cpu import attend_task, attention_nanoseconds, attention_scratch, size_of_task
from agentrt_kernels.product.cpu import Panels, multiply_panels, padded_width, panels_of_stretch, product_nanoseconds
from agentrt_kernels.product.tile import PANEL
from agentrt_kernels.rms_norm.cpu import norm_row
from agentrt_kernels.rotary.cpu import norm_heads, turn_row
from agentrt_kernels.swiglu.cpu import swiglu_row

PHASES = 11
"""Of a layer, at most."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Pool = NDArray[np.uint16] | NDArray[np.float32]
"""Of pages: float32, or float16 as its bits."""


class Weights(NamedTuple):
    """What the layers are made of."""

    panels: Panels
    """Every layer's four weights: queries, keys and values; output; gate and up; down."""
    places_L4: Ints
    """Where each begins in `panels`."""
    biases_LE: Floats
    """Of queries, keys and values; no rows if there are none."""
    norms_L4D: Floats
    """Before and after attention, before and after the MLP; those after are looked at if `has_out_norms`."""
    qk_norms_L2D: Floats
    """Of queries and keys; no rows if there are none."""
    angles_A2TR: Floats
    """Cosines and sines by position."""
    facts_L4: Ints
    """Kind of angles, cache group, place among the group's layers, window."""
    norm_D: Floats
    """After the last layer."""
    head: Panels
    eps: np.float32
    has_out_norms: bool
    is_gelu: bool


class Places(NamedTuple):
    """Where the rows are, and where KV lies."""

    positions_N: Ints
    table_of_N: NDArray[np.int32]
    tables_GSP: NDArray[np.int32]
    pools_G: tuple[Pool, ...]
    strides_G3: Ints
    """Elements of a page, of a layer in it, of its K or V."""
    twin_rows_W: Ints
    twin_tables_W: NDArray[np.int32]
    """Rows whose KV is written to a second table too."""
    page_size: int
    kv_heads: int
    attention_rows: int
    attention_heads: int
    """Rows and KV heads of a task of attention."""


class _Work(NamedTuple):
    """What passes from phase to phase."""

    residual_ND: Floats
    x_ND: Floats
    qkv_NE: Floats
    q_NHD: Floats
    mixed_NHD: Floats
    mixed_NE: Floats
    """The same memory."""
    y_ND: Floats
    """What is added to the sum before the next norm."""
    gate_up_NE: Floats
    gated_NF: Floats
    out_MD: Floats
    logits_MV: Floats
    tapped_K: Ints
    taps_KND: Floats


def run_layers(
    residual_ND: Floats, weights: Weights, places: Places, out_rows_M: Ints, widths: tuple[int, int, int, int],
    tapped: Sequence[int] = (),
) -> tuple[Floats, Floats]:  # fmt: skip
    """The logits for `out_rows_M`, as wide as the panels of the head. `residual_ND`, the embeddings, is overwritten.

    KV of all rows is written to their pages. `widths` are heads, head size, that of the MLP, and of the head's output.
    The other result, `taps_KND`, has the hidden states of all rows after each of the numbers of layers in `tapped`.
    """
    rows, hidden = residual_ND.shape
    heads, size, inner, vocab = widths

    def new(*shape: int) -> Floats:
        return np.empty(shape, dtype=np.float32)

    mixed_NHD = new(rows, heads, size)
    work = _Work(
        residual_ND, new(rows, hidden), new(rows, padded_width((heads + 2 * places.kv_heads) * size)),
        new(rows, heads, size), mixed_NHD, mixed_NHD.reshape(rows, heads * size),
        np.zeros((rows, padded_width(hidden)), dtype=np.float32),  # which the first norm adds
        new(rows, padded_width(2 * inner)), new(rows, inner), new(len(out_rows_M), hidden),
        new(len(out_rows_M), padded_width(vocab)), np.array(tapped, dtype=np.int64), new(len(tapped), rows, hidden),
    )  # fmt: skip
    layers = len(weights.places_L4)
    attention = layers * attention_nanoseconds(mixed_NHD.shape, places.positions_N)
    threads = threads_for(product_nanoseconds(rows, weights.panels) + attention)
    task_rows, task_heads = size_of_task(rows, places.kv_heads, threads)
    places = places._replace(attention_rows=task_rows, attention_heads=task_heads)
    counters = new_counters(PHASES * layers + 3 + len(tapped))
    together(_run, threads, counters, work, weights, places, out_rows_M)
    return work.logits_MV, work.taps_KND


def compiled_in() -> Path | None:
    """The folder in which numba keeps the call, compiled for some kind of weights and pages; None if it never was."""
    folder, line = Path(_run.stats.cache_path or ""), _run.py_func.__code__.co_firstlineno
    return folder if any(folder.glob(f"*._run-{line}.*.nbi")) else None


@ordered()
def _run(counters: Any, work: Any, weights: Any, places: Any, out_rows_M: Any) -> None:
    layers, x_ND, y_ND = weights.places_L4.shape[0], work.x_ND, work.y_ND
    group = work.q_NHD.shape[1] // places.kv_heads
    lines = places.attention_heads * places.attention_rows * group
    scratch = attention_scratch(lines, work.q_NHD.shape[2], places.page_size)
    phase = _norm(counters, np.int64(0), y_ND, work.residual_ND, weights.norms_L4D[0, 0], weights.eps, x_ND)
    for layer in range(layers):
        phase = _tap(counters, phase, layer, layers, work)
        norms_4D, at_4 = weights.norms_L4D[layer], weights.places_L4[layer]
        phase = _product(counters, phase, x_ND, weights.panels, at_4[0], work.qkv_NE)
        phase = _turn(counters, phase, layer, work, weights, places)
        phase = _attend(counters, phase, layer, work, weights, places, scratch)
        phase = _product(counters, phase, work.mixed_NE, weights.panels, at_4[1], y_ND)
        if weights.has_out_norms:
            phase = _norm_in_place(counters, phase, y_ND, norms_4D[1], weights.eps)
        phase = _norm(counters, phase, y_ND, work.residual_ND, norms_4D[2], weights.eps, x_ND)
        phase = _product(counters, phase, x_ND, weights.panels, at_4[2], work.gate_up_NE)
        phase = _gate(counters, phase, work, weights.is_gelu)
        phase = _product(counters, phase, work.gated_NF, weights.panels, at_4[3], y_ND)
        if weights.has_out_norms:
            phase = _norm_in_place(counters, phase, y_ND, norms_4D[3], weights.eps)
        if layer + 1 < layers:
            norm_D = weights.norms_L4D[layer + 1, 0]
            phase = _norm(counters, phase, y_ND, work.residual_ND, norm_D, weights.eps, x_ND)
    phase = _tap(counters, phase, layers, layers, work)
    phase = _norm_out(counters, phase, work, weights, out_rows_M)
    _product(counters, phase, work.out_MD, weights.head, np.int64(0), work.logits_MV)


@inner()
def _tap(counters: Any, phase: int, number: int, layers: int, work: Any) -> int:
    """Copy the hidden states after so many layers, if they are wanted. What the last one adds is not in the sum yet."""
    rows, size = work.residual_ND.shape
    for k in range(work.tapped_K.shape[0]):
        if work.tapped_K[k] == number:
            going = True
            while going:
                n = take(counters, phase, rows)
                going = n >= 0
                if going:
                    for d in range(size):
                        work.taps_KND[k, n, d] = work.residual_ND[n, d] + (
                            work.y_ND[n, d] if number == layers else np.float32(0.0)
                        )
                    finish(counters, phase)
            phase = wait(counters, phase, rows)
    return phase


@inner()
def _product(counters: Any, phase: int, x_NI: Any, panels: Any, panels_at: Any, out_NO: Any) -> int:
    """A thread takes its next stretch before it begins with one, to know what to read ahead."""
    width = out_NO.shape[1]
    stretch = panels_of_stretch(x_NI.shape[0], width)
    tasks = (width // PANEL + stretch - 1) // stretch
    task = take(counters, phase, tasks)
    while task >= 0:
        following = take(counters, phase, tasks)
        multiply_panels(
            task * stretch, (task + 1) * stretch, max(following, task) * stretch, x_NI, panels, panels_at, out_NO
        )
        finish(counters, phase)
        task = following
    return wait(counters, phase, tasks)


@inner()
def _norm(counters: Any, phase: Any, y_ND: Any, residual_ND: Any, weight_D: Any, eps: Any, x_ND: Any) -> int:
    rows, size = x_ND.shape
    while True:
        n = take(counters, phase, rows)
        if n < 0:
            return wait(counters, phase, rows)
        for d in range(size):
            residual_ND[n, d] += y_ND[n, d]
        norm_row(residual_ND[n], weight_D, eps, x_ND[n])
        finish(counters, phase)


@inner()
def _norm_in_place(counters: Any, phase: int, y_ND: Any, weight_D: Any, eps: Any) -> int:
    rows, size = y_ND.shape[0], weight_D.shape[0]
    while True:
        n = take(counters, phase, rows)
        if n < 0:
            return wait(counters, phase, rows)
        norm_row(y_ND[n, :size], weight_D, eps, y_ND[n, :size])
        finish(counters, phase)


@inner(inline="always")
def _norm_out(counters: Any, phase: int, work: Any, weights: Any, out_rows_M: Any) -> int:
    rows, size = work.out_MD.shape
    while True:
        m = take(counters, phase, rows)
        if m < 0:
            return wait(counters, phase, rows)
        n, out_D = out_rows_M[m], work.out_MD[m]
        for d in range(size):
            out_D[d] = work.residual_ND[n, d] + work.y_ND[n, d]
        norm_row(out_D, weights.norm_D, weights.eps, out_D)
        finish(counters, phase)


@inner(inline="always")
def _turn(counters: Any, phase: int, layer: int, work: Any, weights: Any, places: Any) -> int:
    rows, heads, size = work.q_NHD.shape
    kv_heads, page_size = places.kv_heads, places.page_size
    kind, group, depth = weights.facts_L4[layer, 0], weights.facts_L4[layer, 1], weights.facts_L4[layer, 2]
    used = (heads + 2 * kv_heads) * size
    while True:
        n = take(counters, phase, rows)
        if n < 0:
            return wait(counters, phase, rows)
        row_E = work.qkv_NE[n, :used]
        if weights.biases_LE.shape[0] > 0:
            for e in range(used):
                row_E[e] += weights.biases_LE[layer, e]
        heads_GD = row_E.reshape(heads + 2 * kv_heads, size)
        if weights.qk_norms_L2D.shape[0] > 0:
            q_weight_D, k_weight_D = weights.qk_norms_L2D[layer, 0], weights.qk_norms_L2D[layer, 1]
            norm_heads(heads_GD, heads, kv_heads, q_weight_D, k_weight_D, weights.eps)
        position = places.positions_N[n]
        cos_R, sin_R = weights.angles_A2TR[kind, 0, position], weights.angles_A2TR[kind, 1, position]
        pool, kv_stride = places.pools_G[group], places.strides_G3[group, 2]
        for w in range(-1, places.twin_rows_W.shape[0]):
            if w >= 0 and places.twin_rows_W[w] != n:
                continue
            table = places.table_of_N[n] if w < 0 else places.twin_tables_W[w]
            page = np.int64(places.tables_GSP[group, table, position // page_size])
            place = page * places.strides_G3[group, 0] + depth * places.strides_G3[group, 1]
            turn_row(heads_GD, cos_R, sin_R, position, pool, place, page_size, kv_stride, kv_heads, work.q_NHD[n])
        finish(counters, phase)


@inner(inline="always")
def _attend(counters: Any, phase: int, layer: int, work: Any, weights: Any, places: Any, scratch: Any) -> int:
    group, depth, window = weights.facts_L4[layer, 1], weights.facts_L4[layer, 2], weights.facts_L4[layer, 3]
    rows, together = places.attention_rows, places.attention_heads
    tasks = (work.q_NHD.shape[0] + rows - 1) // rows * (places.kv_heads // together)
    while True:
        task = take(counters, phase, tasks)
        if task < 0:
            return wait(counters, phase, tasks)
        attend_task(
            tasks - 1 - task, rows, together, work.q_NHD, places.positions_N, places.table_of_N, places.tables_GSP[group],
            places.pools_G[group], places.page_size, places.strides_G3[group, 0], depth * places.strides_G3[group, 1],
            places.strides_G3[group, 2], places.kv_heads, window, work.mixed_NHD, scratch,
        )  # fmt: skip
        finish(counters, phase)


@inner(inline="always")
def _gate(counters: Any, phase: int, work: Any, is_gelu: bool) -> int:
    rows = work.gated_NF.shape[0]
    while True:
        n = take(counters, phase, rows)
        if n < 0:
            return wait(counters, phase, rows)
        if is_gelu:
            geglu_row(work.gate_up_NE[n], work.gated_NF[n])
        else:
            swiglu_row(work.gate_up_NE[n], work.gated_NF[n])
        finish(counters, phase)
