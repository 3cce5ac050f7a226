"""What a GPU machine is asked for; run it by bench/gpu_check.sh. A section that fails says so and the others go on."""

import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_agents import agents
from gpu_model import DEVICE, DRY, DTYPE, Line, Peaks, seconds, step_of
from gpu_steps import steps

from agentrt.engine.model.config import load_config
from agentrt.engine.model.decoder import Decoder, PagedKV
from agentrt.engine.model.foreign import load_foreign
from agentrt.engine.model.loader import read_weights

ROOT = Path(__file__).parent.parent
TESTS_SECONDS = 200
COPIED = 1 << (14 if DRY else 32)
PRODUCT = 64 if DRY else 8192
ROWS = 5 if DRY else 20
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 6},
    "DeepseekV3": {
        "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 6, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
    },
}  # fmt: skip


def measure_peaks() -> Peaks:
    """Copies of 4 GiB, a product of 8,192 cubed, pinned copies of 1 GiB."""
    source, target = (torch.empty(COPIED, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    a, b = (torch.randn(PRODUCT, PRODUCT, dtype=DTYPE, device=DEVICE) for _ in range(2))
    host = torch.empty(COPIED // 4, dtype=torch.uint8, pin_memory=not DRY)
    there = source[: len(host)]
    return Peaks(
        2 * COPIED / seconds(lambda: target.copy_(source)),
        2 * PRODUCT**3 / seconds(lambda: a @ b),
        len(host) / seconds(lambda: host.copy_(there, non_blocking=True)),
        len(host) / seconds(lambda: there.copy_(host, non_blocking=True)),
    )


def kernel_tests(_: Peaks) -> Iterator[Line]:
    """The kernels' tests on the device, and weights from another process's memory there; in a dry run one file."""
    files = sorted(str(path) for path in (ROOT / "tests" / "kernels").glob("test_launched_*.py"))
    files.append(str(ROOT / "tests" / "engine" / "test_device_weights.py"))
    files = [path for path in files if "swap" in path] if DRY else files
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_SECONDS, check=False)
    print(done.stdout[-4000:], done.stderr[-1000:])
    said = done.stdout.strip().splitlines()
    yield Line(
        "tests of kernels and CUDA IPC", said[-1].strip("= ") if said else "failed: pytest said nothing", "all pass"
    )


@torch.inference_mode()
def logits_against_transformers(_: Peaks) -> Iterator[Line]:
    """Small random models, the same weights on both sides, in float32."""
    import transformers

    for family, own in FAMILIES.items():
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **own})
        theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)  # at transformers' own scale all logits are near 0
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            read = load_config(Path(folder))
            weights = {name: tensor.to(DEVICE) for name, tensor in read_weights(Path(folder), read).items()}
        ours = Decoder(read, weights, "launch")
        batch = step_of(2, 0, ROWS, 16, only_last=False)
        (layout,) = ours.page_layouts(16)
        kv = PagedKV(torch.zeros(batch.tables_GSP.size * layout.page_stride, device=DEVICE), layout)
        ids_N, positions_N, table_of_N, tables_GSP, rows_M = (torch.from_numpy(array).to(DEVICE) for array in batch[:5])
        found_NV = ours.forward(ids_N, positions_N, table_of_N, tables_GSP, [kv], rows_M)
        expected_NV = theirs.to(DEVICE)(ids_N.view(2, ROWS)).logits.flatten(0, 1)
        farthest = (found_NV - expected_NV).abs().max().item()
        yield Line(f"logits of {family}, the farthest from transformers' (fp32)", f"{farthest:.1e}", "1e-4")
    yield _foreign_logits()


def _foreign_logits() -> Line:
    """A family that our decoder does not know, read in chunks over pages; the module itself raises if it is far off."""
    import transformers

    module = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES | {"num_key_value_heads": 2}))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        farthest = load_foreign(Path(folder), str(DEVICE), "not of ours", "launch").decoder.check()
    return Line(f"logits of OLMo 2 through its module ({DTYPE}), part of their spread", f"{farthest:.1e}", "0.1")


SECTIONS: dict[str, Callable[[Peaks], Iterator[Line]]] = {
    "kernel tests": kernel_tests,
    "logits": logits_against_transformers,
    "0.6B": partial(steps, "0.6B"),
    "8B": partial(steps, "8B"),
    "agents": agents,
}


def main() -> None:
    started = time.perf_counter()
    peaks = measure_peaks()
    lines = [
        Line("device", "CPU (dry run: no figure here means anything)" if DRY else torch.cuda.get_device_name()),
        Line("copy on the device", f"{peaks.copy / 1e12:.2f} TB/s"),
        Line(f"product of {PRODUCT} cubed", f"{peaks.matmul / 1e12:.0f} TFLOP/s"),
        Line("pinned copies out, in", f"{peaks.to_host / 1e9:.0f}, {peaks.to_device / 1e9:.0f} GB/s"),
    ]
    for name, section in SECTIONS.items():
        try:
            for line in section(peaks):
                print(f"[{time.perf_counter() - started:5.0f} s] {line.what}: {line.figure}", flush=True)
                lines.append(line)
        except Exception as error:  # the machine is there for minutes: the other sections still say what they can
            traceback.print_exc()
            lines.append(Line(name, f"failed: {type(error).__name__}: {str(error)[:200]}"))
    print(f"\n| torch {torch.__version__} | figure | bar |\n|---|---|---|")
    for line in lines:
        print(f"| {line.what} | {line.figure} | {line.bar} |")
    sys.exit(any("failed" in line.figure for line in lines))


if __name__ == "__main__":
    main()
