"""Attention over keys and values in pages, on a GPU."""

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from agentrt_kernels.paged_attention.flashinfer import FlashPlan
from agentrt_kernels.paged_attention.kernel import attend_kernel, attend_wide_kernel, merge_kernel
from agentrt_kernels.paged_attention.plan import Plan, plan_attention
from agentrt_kernels.pages import PageLayout
from agentrt_kernels.quantized.launch import scales_of

TILE_LANES = 128
"""The most rows times query heads of a KV head in one program."""
BLOCK_T = 64
"""Keys that a program takes at a time."""
WIDE_LANES, WIDE_BLOCK_T = 32, 32
"""Of `attend_wide_kernel`, whose sums are wide."""
AMD_BLOCK_T = 16
"""Keys at a time on AMD's devices: the addresses of more do not fit the scalar registers there."""
IS_AMD = torch.version.hip is not None


class DevicePlan(NamedTuple):
    """A plan on the device."""

    items_I5: Tensor
    slots_NC: Tensor
    num_slots: int
    lanes: int
    """Of a program: enough for the rows of every item."""


def paged_attention(
    q_NHD: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor,
    pool: Tensor, layout: PageLayout, layer: int, window: int = 0, plan: DevicePlan | FlashPlan | None = None,
    cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Each row attends the keys 0..i of its sequence, i its position (the last `window` of them, if not 0); `out_NHD`.

    As the reference has it, with the rows of one sequence side by side in the order of their positions. The plan
    serves every layer of a step; without one it is made here, which waits for the device.
    """
    if isinstance(plan, FlashPlan):
        return plan.attend(q_NHD, pool, layout, layer, window)
    group = q_NHD.shape[1] // layout.kv_heads
    if plan is None:
        positions, table_of, tables = (tensor.cpu().numpy() for tensor in (positions_N, table_of_N, tables_SP))
        made = plan_attention(positions, table_of, tables, layout.page_size, tile_rows(group))
        plan = to_device(made, group, q_NHD.device)
    q_NHD, tables_SP = q_NHD.contiguous(), tables_SP.contiguous()
    out_NHD = torch.empty_like(q_NHD)
    partial_XHD = q_NHD.new_empty(max(plan.num_slots, 1), *q_NHD.shape[1:], dtype=torch.float32)
    lse_XH = partial_XHD.new_empty(partial_XHD.shape[:2])
    attend = _attend_wide if layout.parts == 1 else partial(_attend, cap=cap)
    where = (q_NHD, positions_N, table_of_N, tables_SP, pool, plan.items_I5, out_NHD, partial_XHD, lse_XH)
    attend(*where, layout, layer, window, plan.lanes)
    if plan.num_slots:
        merge_kernel[q_NHD.shape[:2]](
            partial_XHD, lse_XH, plan.slots_NC, out_NHD, q_NHD.shape[1], plan.slots_NC.shape[1], SIZE=layout.head_dim,
            BLOCK_D=block_of(layout.head_dim), num_warps=1,
        )  # fmt: skip
    return out_NHD


def _attend(
    q_NHD: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor, pool: Tensor, items_I5: Tensor,
    out_NHD: Tensor, partial_XHD: Tensor, lse_XH: Tensor, layout: PageLayout, layer: int, window: int, lanes: int,
    cap: float,
) -> None:  # fmt: skip
    scales, largest = scales_of(pool)
    attend_kernel[(items_I5.shape[0], layout.kv_heads)](
        q_NHD, positions_N, table_of_N, tables_SP, pool, scales, items_I5, out_NHD, partial_XHD, lse_XH,
        tables_SP.shape[1], layout.page_stride, layer * layout.layer_stride, layout.kv_stride, layout.kv_heads, window,
        math.log2(math.e) / math.sqrt(layout.head_dim), cap * math.log2(math.e), PAGE=layout.page_size, SIZE=layout.head_dim,
        BLOCK_D=block_of(layout.head_dim), GROUP=q_NHD.shape[1] // layout.kv_heads, BLOCK_M=lanes,
        QUANTISED=largest > 0, CAPPED=cap > 0, **attend_options(lanes),
    )  # fmt: skip


def _attend_wide(
    q_NHD: Tensor, positions_N: Tensor, table_of_N: Tensor, tables_SP: Tensor, pool: Tensor, items_I5: Tensor,
    out_NHD: Tensor, partial_XHD: Tensor, lse_XH: Tensor, layout: PageLayout, layer: int, window: int, lanes: int,
) -> None:  # fmt: skip
    assert (layout.kv_heads, window, layout.scale_size) == (1, 0, 0), "no model has latents of this kind"
    block_m = min(lanes, WIDE_LANES)
    attend_wide_kernel[(items_I5.shape[0], triton.cdiv(lanes, block_m))](
        q_NHD, positions_N, table_of_N, tables_SP, pool, items_I5, out_NHD, partial_XHD, lse_XH, tables_SP.shape[1],
        layout.page_stride, layer * layout.layer_stride, q_NHD.shape[1], math.log2(math.e) / math.sqrt(layout.head_dim),
        PAGE=layout.page_size, SIZE=layout.head_dim, BLOCK_M=block_m, **wide_blocks(layout.head_dim), **wide_options(),
    )  # fmt: skip


def block_of(size: int) -> int:
    """The tile that holds a head of this size."""
    return max(int(triton.next_power_of_2(size)), 16)


def wide_blocks(size: int) -> dict[str, int]:
    """How `attend_wide_kernel` cuts the width of a key."""
    block_a = 1 << (size.bit_length() - 1)
    return {"BLOCK_A": block_a, "BLOCK_B": block_of(max(size - block_a, 1))}


def tile_rows(group: int) -> int:
    """The most rows of an item, for `group` query heads of a KV head."""
    return max(TILE_LANES // group, 1)


def lanes_of(plan: Plan, group: int) -> int:
    """The lanes of a program that hold every item's rows, for `group` query heads of a KV head."""
    return max(int(triton.next_power_of_2(int(plan.items_I5[:, 1].max()) * group)), 16)


def to_device(plan: Plan, group: int, device: torch.device) -> DevicePlan:
    """The plan on `device`, and the lanes it needs."""
    items_I5, slots_NC = (torch.from_numpy(array).to(device, non_blocking=True) for array in plan[:2])
    return DevicePlan(items_I5, slots_NC, plan.num_slots, lanes_of(plan, group))


def attend_options(lanes: int, is_amd: bool = IS_AMD) -> dict[str, int]:
    """How `attend_kernel` is compiled for a tile of so many lanes."""
    warps = 8 if lanes > 64 else 4
    if is_amd:
        return {"BLOCK_T": AMD_BLOCK_T, "num_warps": warps, "num_stages": 2}
    return {"BLOCK_T": BLOCK_T, "num_warps": warps, "num_stages": 2 if lanes > 64 else 3}


def wide_options(is_amd: bool = IS_AMD) -> dict[str, int]:
    """How `attend_wide_kernel` is compiled."""
    if is_amd:
        return {"BLOCK_T": AMD_BLOCK_T, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_T": WIDE_BLOCK_T, "num_warps": 8, "num_stages": 2}
