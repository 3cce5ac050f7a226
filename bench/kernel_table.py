"""Compile every Triton kernel for four GPUs, without one, and print what each takes: the table of docs/kernels.md.

    python bench/kernel_table.py [--target sm_90 ...] [--json]

Shapes are those of a Qwen3-8B layer in bfloat16 (32 query heads, 8 KV heads of 128, pages of 16), of DeepSeek-V3's
latents (576 wide) and of Qwen3-30B-A3B's experts (128). On NVIDIA the numbers
are those of the machine code, read with the `cuobjdump` that Triton brings; a kernel that spills has a stack. On AMD
they are in the assembly. `control` is a kernel that must spill.
"""

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # products and sums are fused, whatever the machine's setting is

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from agentrt_kernels.experts.kernel import grouped_matmul_kernel
from agentrt_kernels.geglu.kernel import geglu_kernel
from agentrt_kernels.matmul.kernel import matmul_kernel
from agentrt_kernels.paged_attention.kernel import attend_kernel, attend_wide_kernel, merge_kernel
from agentrt_kernels.paged_attention.launch import WIDE_LANES, attend_options, wide_blocks, wide_options
from agentrt_kernels.quantized.kernel import quantize_rows_kernel
from agentrt_kernels.rms_norm.kernel import rms_norm_kernel
from agentrt_kernels.rotary.kernel import rotary_kernel
from agentrt_kernels.sample.kernel import cut_kernel, race_kernel
from agentrt_kernels.swap.kernel import copy_pages_kernel
from agentrt_kernels.swiglu.kernel import swiglu_kernel
from agentrt_kernels.verify.kernel import verify_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NVIDIA = frozenset({"sm_80", "sm_90", "sm_100"})
FLOAT8 = frozenset({"sm_90", "sm_100"})
"""Where e4m3 of the OCP kind can be converted."""


class Case(NamedTuple):
    """A kernel at one shape. `types` are those of its arguments in order, constants left out.

    Pointers are multiples of 16, and so are numbers marked `:16`, as Triton finds out at a launch.
    """

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]
    options: dict[str, int]
    """Beyond `constants`: how it is compiled, and constants that depend on the device."""
    targets: frozenset[str] = frozenset(TARGETS)
    amd: dict[str, int] | None = None
    """`options` on AMD's devices, if they are others."""


class Taken(NamedTuple):
    """What a thread or a program of a compiled kernel takes."""

    registers: int
    shared: int
    """Bytes of memory that a program's threads share."""
    spilled: int
    """Bytes of stack (NVIDIA), or registers spilled and bytes of private memory (AMD): 0 if nothing spills."""


@triton.jit
def control_kernel(x_D, out_D, BLOCK: tl.constexpr):
    """It keeps 128 numbers a thread until their maximum is known, in fewer registers: it must spill."""
    x = tl.load(x_D + tl.arange(0, BLOCK))
    tl.store(out_D + tl.arange(0, BLOCK), tl.exp(x - tl.max(x, axis=0)))


def cases() -> list[Case]:
    """Every kernel, and the variants that its launcher chooses among."""
    gate, row, eight_warps = {"BLOCK": 1024}, {"BLOCK": 4096}, {"num_warps": 8}
    rotary = {"PAGE": 16, "HALF": 64, "TURNED": 64, "PARTS": 2, "BLOCK": 64, "NORMED": True}
    one_warp = {"num_warps": 1}
    rotary_types = "*bf16 *fp32 *fp32 *i64 *i32 *i32 *bf16 *bf16 fp32 {0} {1} *bf16 i32 i32:16 i32:16 i32:16 i32 i32"
    attend = {"PAGE": 16, "SIZE": 128, "BLOCK_D": 128, "GROUP": 4}
    attend_types = "*bf16 *i64 *i32 *i32 {0} {1} *i32 *bf16 *fp32 *fp32 i32 i32:16 i32:16 i32:16 i32 i32 fp32 fp32"

    def attention(
        name: str, pool: str, lanes: int, targets: frozenset[str] = frozenset(TARGETS), capped: bool = False
    ) -> Case:
        quantised = pool != "*bf16"
        types = attend_types.format(pool, "*fp32" if quantised else pool)
        constants = attend | {"BLOCK_M": lanes, "QUANTISED": quantised, "CAPPED": capped}
        options, amd = (attend_options(lanes, is_amd) for is_amd in (False, True))
        return Case(name, attend_kernel, types, constants, options, targets, amd)

    def wide(name: str, lanes: int) -> Case:
        types = "*bf16 *i64 *i32 *i32 *bf16 *i32 *bf16 *fp32 *fp32 i32 i32:16 i32:16 i32 fp32"
        constants = {"PAGE": 16, "SIZE": 576, "BLOCK_M": lanes} | wide_blocks(576)
        return Case(name, attend_wide_kernel, types, constants, wide_options(False), amd=wide_options(True))

    def grouped(name: str, rows: int) -> Case:
        constants = {"BLOCK_E": 128, "BLOCK_P": rows, "BLOCK_O": 64, "BLOCK_I": 64}
        types = "*bf16 *i64 *bf16 *i32 *i32 *bf16 i32 i32:16 i32:16"
        return Case(name, grouped_matmul_kernel, types, constants, {"num_warps": 4, "num_stages": 3})

    def product(name: str, x: str, rows: int) -> Case:
        constants = {"WHOLE": x == "*i8", "BLOCK_N": rows, "BLOCK_O": 64, "BLOCK_I": 128}
        options = {"num_warps": 8 if rows > 64 else 4, "num_stages": 3}
        return Case(name, matmul_kernel, f"{x} *i8 *fp32 *fp32 *bf16 i32 i32:16 i32:16", constants, options)

    return [
        Case("rms_norm", rms_norm_kernel, "*bf16 *bf16 *bf16 *bf16 fp32 i32:16", row | {"ADD": True}, eight_warps),
        Case("swiglu", swiglu_kernel, "*bf16 *bf16 i32:16", gate, {}),
        Case("geglu", geglu_kernel, "*bf16 *bf16 i32:16", gate, {}),
        Case("rotary", rotary_kernel, rotary_types.format("*bf16", "*bf16"), rotary | {"LARGEST": 0.0}, one_warp),
        Case("rotary, int8 pages", rotary_kernel, rotary_types.format("*i8", "*fp32"), rotary | {"LARGEST": 127.0}, one_warp),
        attention("attend, 16 lanes", "*bf16", 16),
        attention("attend, 128 lanes", "*bf16", 128),
        attention("attend, 128 lanes, capped", "*bf16", 128, capped=True),
        attention("attend, 16 lanes, int8 pages", "*i8", 16),
        attention("attend, 16 lanes, fp8 pages", "*fp8e4nv", 16, FLOAT8),
        wide("attend, latents, 16 lanes", 16),
        wide("attend, latents, 32 lanes", WIDE_LANES),
        grouped("experts, 16 rows", 16),
        grouped("experts, 64 rows", 64),
        Case("merge", merge_kernel, "*fp32 *fp32 *i32 *bf16 i32 i32", {"SIZE": 128, "BLOCK_D": 128}, {"num_warps": 1}),
        Case("quantize_rows", quantize_rows_kernel, "*bf16 *i8 *fp32 i32:16", row | {"LARGEST": 127.0}, eight_warps),
        product("w8a16, 16 rows", "*bf16", 16),
        product("w8a16, 128 rows", "*bf16", 128),
        product("w8a8, 128 rows", "*i8", 128),
        Case("copy_pages", copy_pages_kernel, "*i32 *i32 *i32 i32:16", {"BLOCK": 4096}, {}),
        Case("verify", verify_kernel, "*i64 *i64 *i32 *i32 *i32 *i32 i32", {}, {"num_warps": 1}),
        Case("cut", cut_kernel, "*fp64 *i64 *fp64 *fp64 i32", {"BLOCK": 1024}, {"num_warps": 8}),
        Case("race", race_kernel, "*fp64 *i64 *i64 *fp64 *i64 i32", {"BLOCK": 1024}, {}),
        Case("control", control_kernel, "*fp32 *fp32", {"BLOCK": 4096}, one_warp | {"maxnreg": 40}, NVIDIA),
        Case("control on AMD", control_kernel, "*fp32 *fp32", {"BLOCK": 131072}, {"num_warps": 16}, frozenset({"gfx942"})),
    ]  # fmt: skip


def compile_case(case: Case, target: str) -> Taken:
    """Compile one kernel; Triton keeps the outcome in its cache by the hash of the source."""
    is_amd, types = TARGETS[target].backend == "hip", iter(case.types.split())
    options = dict(case.amd if is_amd and case.amd else case.options)
    constants = case.constants | {name: options.pop(name) for name in case.kernel.arg_names if name in options}
    signature = {name: "constexpr" if name in constants else next(types) for name in case.kernel.arg_names}
    aligned = [place for place, kind in enumerate(signature.values()) if kind[0] == "*" or kind.endswith(":16")]
    signature = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(case.kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    taken = _read_assembly(compiled.asm["amdgcn"]) if is_amd else _read_machine_code(compiled.asm["cubin"])
    return taken._replace(shared=max(taken.shared, compiled.metadata.shared))  # what is asked for at the launch too


def _read_machine_code(cubin: bytes) -> Taken:
    """REG, SHARED and STACK of NVIDIA's machine code. (LOCAL stays 0 whatever spills.)"""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return Taken(*(int(re.findall(rf"{word}:(\d+)", said)[0]) for word in ("REG", "SHARED", "STACK")))


def _read_assembly(assembly: str) -> Taken:
    def of(field: str) -> int:
        return int(re.findall(rf"\.{field}: +(\d+)", assembly)[0])

    spilled = of("vgpr_spill_count") + of("sgpr_spill_count") + of("private_segment_fixed_size")
    return Taken(of("vgpr_count"), of("group_segment_fixed_size"), spilled)


def table(targets: list[str]) -> dict[str, dict[str, Taken]]:
    """By kernel, by target."""
    return {
        case.name: {target: compile_case(case, target) for target in targets if target in case.targets}
        for case in cases()
    }


def markdown(taken: dict[str, dict[str, Taken]], targets: list[str]) -> str:
    """Registers / KiB of shared memory / spilled, a column for each target."""
    lines = ["| kernel | " + " | ".join(targets) + " |", "|---|" + "---|" * len(targets)]
    for name, by_target in taken.items():
        cells = [
            f"{found.registers} / {math.ceil(found.shared / 1024)} / {found.spilled}" if found else "–"
            for found in map(by_target.get, targets)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What each Triton kernel takes on each GPU.")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    targets = arguments.target or list(TARGETS)
    taken = table(targets)
    print(json.dumps(taken) if arguments.json else markdown(taken, targets))


if __name__ == "__main__":
    main()
