"""Decode and prefill on the CPU, beside llama.cpp and vLLM: the same model, contexts and number of ids, interleaved.

    python bench/engine_cpu.py [--model smollm2-135m] [--rounds 5] [--plot FILE]
        [--llama RUN --gguf F16.gguf --gguf F32.gguf]   RUN starts a binary of llama.cpp: RUN llama-batched-bench ARGS
        [--vllm PYTHON]                                 an interpreter that has vLLM's CPU build

Contexts of 576 ids, 64 new ones, greedy on all sides; ours also at temperature 1, and always with logprobs. "Free rows" is
ours without the promise that a row's bits are its own. Prints medians, the ratio of ours to the best
unquantised peer with its interval, and the share of each step that the machine would need at least (bench/roofline.py).
What is not given or does not run is skipped with a message.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from contest import Rates, interleave, plot, table
from roofline import decode_work, measure_machine

from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Tokens
from agentrt.engine.kv.lease import Lease
from agentrt.engine.model.config import load_config
from agentrt.engine.model.decoder import Decoder
from agentrt.engine.model.loader import read_weights
from agentrt.engine.runner import ModelRunner
from agentrt.engine.sequence import Sequence as Request
from agentrt.engine.step import EngineCore

CONTEXT, SHARED, GROUP, NEW = 576, 512, 8, 64
BATCHES = (1, 8, 32)
SHARED_CASE = "32, shared 512"
PEER_SECONDS = 1800


def agentrt(folder: Path, temperature: float, is_exact: bool, seeds: np.random.Generator) -> Rates:
    """Prefill and decode of every case, in engine steps of this process."""
    core = _core(folder, is_exact)
    rates: Rates = {}
    for batch in BATCHES:
        prompts = seeds.integers(1000, 40_000, size=(batch, CONTEXT)).tolist()
        prefill, rates[f"decode {batch}"] = _run(core, prompts, temperature)
        if batch == 8:
            rates["prefill 8"] = prefill
    prefixes = seeds.integers(1000, 40_000, size=(32 // GROUP, SHARED)).tolist()
    tails = seeds.integers(1000, 40_000, size=(32, CONTEXT - SHARED)).tolist()
    prompts = [prefixes[row // GROUP] + tails[row] for row in range(32)]
    rates[f"decode {SHARED_CASE}"] = _run(core, prompts, temperature)[1]
    return rates


@cache
def _core(folder: Path, is_exact: bool) -> EngineCore:
    config, tokenizer = load_config(folder), Tokenizer.load(folder)
    weights = {name: tensor.float() for name, tensor in read_weights(folder, config).items()}
    spec = EngineSpec(kv_tokens=32 * (CONTEXT + NEW + 16))
    runner = ModelRunner(Decoder(config, weights, is_exact=is_exact), spec)
    return EngineCore(runner, spec, vocab_size=tokenizer.vocab_size, bytes_of=tokenizer.bytes_of)


def _run(core: EngineCore, prompts: Sequence[list[int]], temperature: float) -> tuple[float, float]:
    """Prompt ids a second, then sampled ids a second of a batch in which every sequence decodes."""
    params = SamplingParams(temperature=temperature)
    open_sequences: list[tuple[Lease, Tokens]] = []
    before, started = core.statistics(0).tokens_prefilled, time.perf_counter()
    for row, prompt in enumerate(prompts):
        lease, tokens = core.open(), Tokens()
        tokens.observe(prompt)
        open_sequences.append((lease, tokens))
        core.submit(Request(tokens=tokens, params=params, max_tokens=1, group=str(row // GROUP)), lease)
    _drain(core)
    prefill = (core.statistics(0).tokens_prefilled - before) / (time.perf_counter() - started)
    for seed, (lease, tokens) in enumerate(open_sequences):
        core.submit(Request(tokens=tokens, params=params, max_tokens=NEW, seed=seed), lease)
    core.step()
    started = time.perf_counter()
    _drain(core)
    decode = len(prompts) * (NEW - 1) / (time.perf_counter() - started)
    for lease, _ in open_sequences:
        core.cache.close(lease)
    return prefill, decode


def _drain(core: EngineCore) -> None:
    while not core.is_idle:
        core.step()


def llama(run: str, gguf: Path) -> Rates:
    """llama.cpp's own benchmark of batched decoding."""
    rates: Rates = {}
    shared = ["-npp", str(CONTEXT), "-ntg", str(NEW), "-t", str(torch.get_num_threads()), "--output-format", "jsonl"]
    command = [run, "llama-batched-bench", "-m", str(gguf), "-c", "24576", "-npl", ",".join(map(str, BATCHES)), *shared]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rates[f"decode {row['pl']}"] = row["speed_tg"]
            if row["pl"] == 8:
                rates["prefill 8"] = row["speed_pp"]
    # It has no attention that reads a shared prefix once, so its row for 32 stands for both.
    return rates | {f"decode {SHARED_CASE}": rates["decode 32"]}


def vllm(python: str, folder: Path, seed: int) -> Rates:
    """vLLM's CPU build in a process of its own (bench/vllm_cpu.py)."""
    script = Path(__file__).with_name("vllm_cpu.py")
    cores = f"0-{torch.get_num_threads() - 1}"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "PYTHONPATH": ""}
    command = [python, str(script), str(folder), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS, check=True, env=environment)
    rates: Rates = json.loads(done.stdout.splitlines()[-1])
    return rates


def contenders(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Rates]]:
    """What can run here; the rest is named as skipped."""
    seeds = np.random.default_rng(0)
    runs: dict[str, Callable[[], Rates]] = {
        "agentrt": partial(agentrt, folder, 0.0, True, seeds),
        "agentrt T=1": partial(agentrt, folder, 1.0, True, seeds),
        "agentrt free rows": partial(agentrt, folder, 0.0, False, seeds),
    }
    for gguf in options.gguf if options.llama else ():
        runs[f"llama.cpp {gguf.stem}"] = partial(llama, options.llama, gguf)
    if options.vllm:
        runs["vLLM fp32"] = lambda: vllm(options.vllm, folder, int(seeds.integers(1 << 30)))
    for name, given in (("llama.cpp", options.llama and options.gguf), ("vLLM", options.vllm)):
        if not given:
            print(f"{name}: skipped, it is not given")
    return runs


def print_roofline(folder: Path, medians: Rates) -> None:
    """The machine's limits and the share of each step that they explain."""
    machine, config = measure_machine(), load_config(folder)
    print(f"reads {machine.bytes_per_second / 1e9:.1f} GB/s, products {machine.flops_per_second / 1e9:.0f} GFLOP/s")
    for case, rate in medians.items():
        if case.startswith("decode"):
            batch = int(case.split()[1].rstrip(","))
            unique = CONTEXT - SHARED + SHARED / GROUP if case.endswith(SHARED_CASE) else CONTEXT
            work = decode_work(config, 2, batch, CONTEXT, unique)
            print(
                f"{case:<24} {1000 * batch / rate:6.1f} ms a step, {work.fraction(machine, batch / rate):.0%} of the roofline"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama")
    parser.add_argument("--gguf", type=Path, action="append", default=[])
    parser.add_argument("--vllm")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    folder = find_model(options.model)
    print(f"agentrt: float16 weights, float32 sums and KV; torch {version('torch')}, {torch.get_num_threads()} threads")
    print(f"load average {os.getloadavg()[0]:.1f}")
    runs = contenders(options, folder)
    found = interleave(runs, options.rounds)
    peers = [name for name in found if not name.startswith("agentrt") and "Q" not in name]
    print(table(found, "agentrt", "ids a second", peers))
    print_roofline(folder, {case: statistics.median(rates) for case, rates in found["agentrt"].items()})
    if options.plot:
        plot(found, f"{options.model}, contexts of {CONTEXT}, ids a second", options.plot)


if __name__ == "__main__":
    main()
