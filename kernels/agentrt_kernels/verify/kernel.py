"""Which drafted ids stand, as a Triton kernel: a program is one sequence's walk."""

import triton
import triton.language as tl


@triton.jit
def verify_kernel(
    drafted_N,
    sampled_N,
    parents_N,
    starts_T,
    counts_S,
    nodes_SW,
    longest,
):
    """A child stands behind its parent, so one pass over the nodes finds the walk."""
    s = tl.program_id(0)
    last, stop = tl.load(starts_T + s), tl.load(starts_T + s + 1)
    wanted = tl.load(sampled_N + last)
    count = 1
    tl.store(nodes_SW + s * longest, last)
    for node in range(last + 1, stop):
        drafted = tl.load(drafted_N + node)
        if (tl.load(parents_N + node) == last) & (drafted == wanted) & (wanted >= 0) & (count < longest):
            tl.store(nodes_SW + s * longest + count, node)
            last = node
            wanted = tl.load(sampled_N + node)
            count += 1
    tl.store(counts_S + s, count)
