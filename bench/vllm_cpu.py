"""vLLM's side of bench/engine_cpu.py, run by vLLM's own interpreter: `python vllm_cpu.py MODEL`.

Says `{}` when it is ready; then, for each line of standard input, a seed, one line of JSON: a round. Decoding is the time of
65 ids less that of 1, so prefill is not in it.
"""

import json
import random
import sys
import time

CONTEXT, SHARED, GROUP, NEW = 576, 512, 8, 64


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024, max_num_seqs=32, enable_prefix_caching=True)

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    seconds([[1] * CONTEXT] * 2, 4)
    print("{}", flush=True)
    for line in sys.stdin:
        draw, rates = random.Random(int(line)), {}
        for name, prompts in _cases(draw).items():
            first = seconds(prompts, 1)
            if name == "8":
                rates["prefill 8"] = 8 * CONTEXT / first
            cached = seconds(prompts, 1)
            rates[f"decode {name}"] = len(prompts) * NEW / (seconds(prompts, NEW + 1) - cached)
        print(json.dumps(rates), flush=True)


def _cases(draw: random.Random) -> dict[str, list[list[int]]]:
    """Prompts that nothing has seen yet."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(1000, 40_000) for _ in range(count)]

    prefixes = [ids(SHARED) for _ in range(32 // GROUP)]
    cases = {str(batch): [ids(CONTEXT) for _ in range(batch)] for batch in (1, 8, 32)}
    return cases | {"32, shared 512": [prefixes[row // GROUP] + ids(CONTEXT - SHARED) for row in range(32)]}


if __name__ == "__main__":
    main()
