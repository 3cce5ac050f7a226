"""All linear layers of a model at 1, 8, 32 and 512 rows: our product, whose rows are exact, beside torch's two, interleaved.

    python bench/products.py [--model smollm2-135m] [--rounds 7]

FBGEMM's float16 product (`torch.ops.quantized.linear_dynamic_fp16`) is the fastest that torch has for these weights on AVX2;
the bits of a row depend on the number of rows there. Prints milliseconds for one pass over all layers and the head, and ratios.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from contest import Rates, interleave, table
from torch import Tensor

from agentrt.core.models import find_model
from agentrt.engine.model.config import load_config
from agentrt.engine.model.loader import read_weights
from agentrt_kernels.product import cpu

ROWS = (1, 8, 32, 512)
Multiply = Callable[[Tensor], Tensor]


def ours(weight_OI: Tensor) -> Multiply:
    panels, outputs = cpu.pack(weight_OI, torch.float16), weight_OI.shape[0]
    return lambda x_NI: cpu.product(x_NI, panels, outputs)


def fbgemm(weight_OI: Tensor) -> Multiply:
    packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x_NI: multiply(x_NI, packed)


def mkl(weight_OI: Tensor) -> Multiply:
    return lambda x_NI: torch.nn.functional.linear(x_NI, weight_OI)


@torch.inference_mode()
def passes_a_second(layers: list[tuple[int, Multiply]]) -> Rates:
    rates: Rates = {}
    for rows in ROWS:
        inputs = {width: torch.randn(rows, width) for width in {width for width, _ in layers}}
        times = []
        for _ in range(3 if rows < 512 else 1):
            started = time.perf_counter()
            for width, multiply in layers:
                multiply(inputs[width])
            times.append(time.perf_counter() - started)
        rates[f"{rows} rows"] = 1 / min(times)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = find_model(options.model)
    read = read_weights(folder, load_config(folder))
    weights = [tensor.float() for tensor in read.values() if tensor.dim() == 2]
    makers = {"agentrt fp16": ours, "FBGEMM fp16": fbgemm, "MKL fp32": mkl}
    runs: dict[str, Callable[[], Rates]] = {
        name: partial(passes_a_second, [(weight_OI.shape[1], make(weight_OI)) for weight_OI in weights])
        for name, make in makers.items()
    }
    runs["agentrt fp16"]()  # compiles
    found = interleave(runs, options.rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(table(found, "agentrt fp16", "passes a second", list(makers)[1:]))


if __name__ == "__main__":
    main()
