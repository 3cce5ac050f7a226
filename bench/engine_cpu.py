"""Decode and prefill on the CPU, beside llama.cpp and vLLM: the same model, contexts and number of ids, interleaved.

    python bench/engine_cpu.py [--model smollm2-135m] [--kv fp16] [--rounds 5] [--kept FILE] [--plot FILE]
        [--llama RUN --gguf F16.gguf --gguf F32.gguf]   RUN starts a binary of llama.cpp: RUN llama-batched-bench ARGS
        [--vllm PYTHON]                                 an interpreter that has vLLM's CPU build

Contexts of 576 ids, 64 new ones, greedy on all sides; ours also at temperature 1, and always with logprobs. Our KV is in
float16, as llama.cpp's is by default; `--kv auto` is our own default, float32. Prints medians, the ratio of ours to the best
unquantised peer with its interval, and the share of each step that the machine would need at least (bench/roofline.py). What
is not given is skipped with a message. `--kept FILE` keeps whole rounds, and goes on from those it has, for a machine that is
quiet for minutes only.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from contest import Rates, awake, interleave, peer_environment, plot, table
from roofline import decode_work, measure_machine

from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec, KVPrecision, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import Tokens
from agentrt.engine.model.config import load_config
from agentrt.engine.model.loader import load_model
from agentrt.engine.model.quantized import Precision
from agentrt.engine.runner import ModelRunner
from agentrt.engine.sequence import Sequence as Request
from agentrt.engine.step import EngineCore

CONTEXT, SHARED, GROUP, NEW = 576, 512, 8, 64
BATCHES = (1, 8, 32)
SHARED_CASE = "32, shared 512"
PEER_SECONDS = 1800


def agentrt(folder: Path, kv: KVPrecision, seeds: np.random.Generator) -> Rates:
    """Prefill and decode of every case, in engine steps of this process."""
    core = _core(folder, kv)
    rates: Rates = {}
    for batch in BATCHES:
        prompts = seeds.integers(1000, 40_000, size=(batch, CONTEXT)).tolist()
        rates |= _run(core, prompts, str(batch))
    prefixes = seeds.integers(1000, 40_000, size=(32 // GROUP, SHARED)).tolist()
    tails = seeds.integers(1000, 40_000, size=(32, CONTEXT - SHARED)).tolist()
    return rates | _run(core, [prefixes[row // GROUP] + tails[row] for row in range(32)], SHARED_CASE)


@cache
def _core(folder: Path, kv: KVPrecision) -> EngineCore:
    """The engine, warm."""
    spec = EngineSpec(kv_tokens=64 * (CONTEXT + NEW + 16), host_tokens=0)
    tokenizer = Tokenizer.load(folder)
    runner = ModelRunner(load_model(folder, precision=Precision(kv=kv)).decoder, spec)
    core = EngineCore(runner, spec, vocab_size=tokenizer.vocab_size, bytes_of=tokenizer.bytes_of)
    _run(core, [[1] * 64] * 2, "")
    return core


def _run(core: EngineCore, prompts: Sequence[list[int]], name: str) -> Rates:
    """Prompt ids a second; sampled ids a second of a batch in which every sequence decodes, greedy and at temperature 1."""
    rates: Rates = {}
    prefill = _sample(core, prompts, 0.0, 1)[0]
    if name == "8":
        rates["prefill 8"] = prefill
    for suffix, temperature in (
        ("", 0.0),
        (" T=1", 1.0),
    ):  # the prompts are in the prefix cache, but for their last ids
        rates[f"decode {name}{suffix}"] = _sample(core, prompts, temperature, NEW)[1]
    return rates


def _sample(core: EngineCore, prompts: Sequence[list[int]], temperature: float, count: int) -> tuple[float, float]:
    """Sample `count` ids after each prompt: prompt ids a second, and sampled ids a second once all have their first."""
    leases, requests = [core.open() for _ in prompts], []
    before, started = core.statistics(0), time.perf_counter()
    for row, (lease, prompt) in enumerate(zip(leases, prompts, strict=True)):
        tokens = Tokens()
        tokens.observe(prompt)
        params = SamplingParams(temperature=temperature)
        requests.append(Request(tokens=tokens, params=params, max_tokens=count, seed=row, group=str(row // GROUP)))
        core.submit(requests[-1], lease)
    while not all(request.num_sampled for request in requests):
        core.step()
    first, in_between = time.perf_counter(), core.statistics(0)
    while not core.is_idle:
        core.step()
    ended, after = time.perf_counter(), core.statistics(0)
    for lease in leases:
        core.close(lease)
    prefilled, sampled = (
        in_between.tokens_prefilled - before.tokens_prefilled,
        after.tokens_sampled - in_between.tokens_sampled,
    )
    return prefilled / (first - started), sampled / (ended - first)


def llama(run: str, gguf: Path) -> Rates:
    """llama.cpp's own benchmark of batched decoding."""
    rates: Rates = {}
    work = ["-npp", str(CONTEXT), "-ntg", str(NEW), "-npl", ",".join(map(str, BATCHES)), "-c", "24576"]
    work += ["-t", str(torch.get_num_threads()), "--output-format", "jsonl"]
    command = [run, "llama-batched-bench", "-m", str(gguf), *work]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PEER_SECONDS, check=True, env=peer_environment()
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rates[f"decode {row['pl']}"] = row["speed_tg"]
            if row["pl"] == 8:
                rates["prefill 8"] = row["speed_pp"]
    # It has no attention that reads a shared prefix once, so its row for 32 stands for both.
    return rates | {f"decode {SHARED_CASE}": rates["decode 32"]}


@contextmanager
def vllm(python: str, folder: Path) -> Iterator[Callable[[int], Rates]]:
    """vLLM's CPU build in a process of its own (bench/vllm_cpu.py), loaded once; from a seed to a round."""
    script, cores = Path(__file__).with_name("vllm_cpu.py"), f"0-{torch.get_num_threads() - 1}"
    environment = peer_environment() | {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
    }
    command, pipe = [python, str(script), str(folder)], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdin
        assert process.stdout
        asked, said = process.stdin, process.stdout

        def answer() -> Rates:
            for line in said:
                if line.startswith("{"):
                    rates: Rates = json.loads(line)
                    return rates
            raise SystemExit("vLLM ended before its round did")

        def run(seed: int) -> Rates:
            with awake(process):
                print(seed, file=asked, flush=True)
                return answer()

        with awake(process):
            answer()
        yield run
        os.killpg(process.pid, signal.SIGKILL)


def contenders(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Callable[[], Rates]]:
    """What can run here; the rest is named as skipped."""
    seeds = np.random.default_rng(0)
    runs: dict[str, Callable[[], Rates]] = {"agentrt": partial(agentrt, folder, options.kv, seeds)}
    for gguf in options.gguf if options.llama else ():
        runs[f"llama.cpp {gguf.stem}"] = partial(llama, options.llama, gguf)
    if options.vllm:
        run = stack.enter_context(vllm(options.vllm, folder))
        runs["vLLM fp32"] = lambda: run(int(seeds.integers(1 << 30)))
    for name, given in (("llama.cpp", options.llama and options.gguf), ("vLLM", options.vllm)):
        if not given:
            print(f"{name}: skipped, it is not given")
    return runs


def print_roofline(folder: Path, kv_bytes: int, medians: Rates) -> None:
    """The machine's limits and the share of each step that they explain."""
    machine, config = measure_machine(), load_config(folder)
    print(f"reads {machine.bytes_per_second / 1e9:.1f} GB/s, products {machine.flops_per_second / 1e9:.0f} GFLOP/s")
    for case, rate in medians.items():
        if case.startswith("decode") and "T=1" not in case:
            batch = int(case.split()[1].rstrip(","))
            unique = CONTEXT - SHARED + SHARED / GROUP if case.endswith(SHARED_CASE) else CONTEXT
            work = decode_work(config, 2, kv_bytes, batch, CONTEXT, unique)
            print(
                f"{case:<24} {1000 * batch / rate:6.1f} ms a step, {work.fraction(machine, batch / rate):.0%} of the roofline"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv", choices=("fp16", "auto"), default="fp16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama")
    parser.add_argument("--gguf", type=Path, action="append", default=[])
    parser.add_argument("--vllm")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    folder = find_model(options.model)
    kv_bytes = 4 if options.kv == "auto" else 2
    print(f"agentrt: float16 weights, float32 sums, KV in float{8 * kv_bytes}; torch {version('torch')}")
    print(f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.1f}")
    with ExitStack() as stack:
        found = interleave(contenders(options, folder, stack), options.rounds, options.kept)
    peers = [name for name in found if not name.startswith("agentrt") and "Q" not in name]
    print(table(found, "agentrt", "ids a second", peers))
    print_roofline(folder, kv_bytes, {case: statistics.median(rates) for case, rates in found["agentrt"].items()})
    if options.plot:
        plot(found, f"{options.model}, contexts of {CONTEXT}, ids a second", options.plot)


if __name__ == "__main__":
    main()
