"""Drafts that branch beside chains of no more ids: how many stand, by count; no clock plays a part.

    python bench/branches.py [--pieces 12] [--draft sprout-eagle3]

Siblings of `speculate_cpu.py` (sprout, groups of 8 on calculator tasks, T = 1), every draft verified whole. Without `--draft`
drafts come from text, with it from the head alone. All lines sample the same ids. A line gives the ids of a draft at most
(`engine.draft_length`), the ways that it may go on (`engine.draft_branches`), and the ids proposed and those that stood a
verification; at last the ids a step of one request, where those without a draft count too.
"""

import argparse

from speculate_cpu import engine, siblings

from agentrt.core.protocol import EngineStatistics
from agentrt.engine.speculate.gate import OpenGate
from agentrt.engine.step import EngineCore
from agentrt_envs import calculator

LENGTHS = {"": (4, 8, 16), "head": (2, 3)}
BRANCHES = {"": (1, 2, 4), "head": (1, 2)}


def verify_all(core: EngineCore, *, text: bool) -> None:
    """Look for drafts before every step and verify what is found; nothing from text if the head is to be alone."""
    speculator = core.speculator
    assert speculator is not None
    speculator.gate = OpenGate()
    speculator.trial.note = lambda plain, spent: None  # type: ignore[method-assign]
    if not text:
        speculator._from_text = lambda sequences, terms: {}  # type: ignore[method-assign]


def line(length: int, branches: int, found: EngineStatistics) -> str:
    proposed, stood = (count / found.verifications for count in (found.tokens_drafted, found.tokens_accepted))
    ids_a_step = found.tokens_sampled / (found.tokens_sampled - found.tokens_accepted)
    return f"{length:6} {branches:8} {proposed:9.2f} {stood:6.3f} {ids_a_step:10.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=12, help="groups of 8")
    parser.add_argument("--draft", default="", help="a draft head, by name or folder")
    options = parser.parse_args()
    prompts = [tuple(calculator.task("train", index).messages) for index in range(64)]
    work, which = siblings("sprout", 1, prompts, calculator.Calculator.tools), "head" if options.draft else ""
    print(f"{'length':>6} {'branches':>8} {'proposed':>9} {'stood':>6} {'ids a step':>10}")
    expected = None
    for length in LENGTHS[which]:
        for branches in BRANCHES[which]:
            core = engine("sprout", "on", options.draft, draft_length=length, draft_branches=branches)
            verify_all(core, text=not options.draft)
            said = [work(core, piece) for piece in range(options.pieces)]
            expected = expected or said
            assert said == expected, "other ids"
            print(line(length, branches, core.statistics(0)), flush=True)


if __name__ == "__main__":
    main()
