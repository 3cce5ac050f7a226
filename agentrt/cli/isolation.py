"""What is in force around tools on this machine, in words: for `agentrt doctor --sandbox` and `agentrt tools check`."""

from agentrt.sandbox.level import Isolation, Level
from agentrt.sandbox.probe import DENIED

MEANINGS = {
    Level.L3: "namespaces, Landlock, seccomp and limits: a tool has a root, processes and a network of its own",
    Level.L2: "Landlock, seccomp and limits: files, network and system calls are shut; other processes can be seen",
    Level.L1: "limits only: a tool can read what you can read; refused unless the tool or the run allows it",
}


def report(isolation: Isolation) -> str:
    """The level and what it means, what a canary has tried, whom each limit is for, why there is no more and what would
    change that; one thing a line."""
    lines = [f"isolation  {isolation.line}", f"that is    {MEANINGS[isolation.level]}"]
    lines += [f"tried      {layer}: {', '.join(acts)}: {isolation.layers[layer]}" for layer, acts in DENIED.items()]
    lines += [f"held for   {limit}: {holder}" for limit, holder in isolation.limits.items()]
    lines += [f"not more   {reason}" for reason in isolation.reasons]
    lines += [f"fix        {fix}" for fix in isolation.fixes]
    if isolation.level is max(Level):
        lines.append(
            "not more   there is no higher level here: for code that would spend a bug of the kernel, use a microVM"
        )
    return "\n".join(lines)
