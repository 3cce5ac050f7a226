"""Drafts that branch: the same ids and bits as without speculation, and pages, hidden states and rows of each branch."""

import random
from collections.abc import Sequence as List
from functools import cache

import pytest
from test_speculation import VOCAB, drain, everything, keep_open, make_core, prompt, run_all, sampled, submit

from agentrt.core.models import find_model
from agentrt.core.spec import EngineSpec, SamplingParams
from agentrt.core.tokenizer import Tokenizer
from agentrt.core.tokens import IntArray
from agentrt.engine.batch import build_batch
from agentrt.engine.model.decoder import Decoder
from agentrt.engine.model.loader import load_model
from agentrt.engine.model.quantized import FULL, Precision
from agentrt.engine.runner import ModelRunner
from agentrt.engine.sequence import Sequence
from agentrt.engine.speculate.draft import NO_DRAFT, Branch, Draft
from agentrt.engine.speculate.gate import Terms
from agentrt.engine.step import EngineCore

#          -1 ─ 5 ─ 6 ─ 7        places 0, 2, 5
#           │    └─ 8            place 4
#           └─ 9 ─ 6             places 1, 3
TREE = Draft((5, 9, 6, 6, 8, 7), (), "text", (-1, -1, 0, 1, 0, 2))
CHAIN = Draft((5, 6, 7))


def test_paths_of_a_tree() -> None:
    assert TREE.branches() == [Branch([0, 2, 5], [], -1), Branch([1, 3], [], 0), Branch([4], [0], 0)]
    assert TREE.order() == [0, 2, 5, 1, 3, 4]
    assert [TREE.path(row) for row in range(7)] == [[], [0], [1], [0, 2], [1, 3], [0, 4], [0, 2, 5]]
    assert [TREE.after(place) for place in range(-1, 6)] == [[0, 1], [2, 4], [3], [5], [], [], []]
    assert TREE.walk([5, 6, 7, 1]) == [0, 2, 5]
    assert TREE.walk([9, 6, 7]) == [1, 3]
    assert TREE.walk([6]) == []
    assert TREE.cut(4).branches() == [Branch([0, 2], [], -1), Branch([1, 3], [], 0)]
    assert TREE.ordered([1, 3, 0, 4, 2, 5]) == Draft((9, 6, 5, 8, 6, 7), (), "text", (-1, 0, -1, 2, 2, 4))


def test_a_chain_is_a_tree_with_one_branch() -> None:
    spelled = CHAIN._replace(parents=(-1, 0, 1))
    for ask in (Draft.branches, Draft.order, lambda one: one.walk([5, 6, 1]), lambda one: one.after(1)):
        assert ask(CHAIN) == ask(spelled)
    assert (
        [CHAIN.path(row) for row in range(4)] == [spelled.path(row) for row in range(4)] == [[], [0], [0, 1], [0, 1, 2]]
    )
    assert NO_DRAFT.branches() == [Branch([], [], -1)]


def test_rows_of_a_tree_in_a_batch() -> None:
    """Six ids are computed, in pages of 4: the branches begin with copies of the second page, and share what is new in it."""
    core = make_core(speculate=False)
    sequence = submit(core, [1, 2, 3, 4, 5, 6])
    core.step()
    sequence.draft, first = TREE, sampled(sequence)[0]
    core.cache.grow(sequence.lease, 13)
    copies = core.cache.branch(sequence.lease, [(0, 7, 9), (0, 8, 9)])
    table, one, two = (tables[0].tolist() for tables in (sequence.lease.table, *sequence.lease.branches))
    assert [(copy.group, copy.source, copy.target) for copy in copies] == [(0, table[1], one[1])]
    assert (one[0], len(one), two[:2], len(two)) == (table[0], 3, table[:2], 3)
    assert len({*table, *one, *two}) == 4 + 2 + 1
    batch = build_batch([(sequence, 7)], 4)
    assert batch.token_ids_N.tolist() == [first, 5, 6, 7, 9, 6, 8]
    assert batch.positions_N.tolist() == [6, 7, 8, 9, 7, 8, 8]
    assert batch.table_of_N.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert batch.tables_GSP[0].tolist() == [table, [*one, -1], [*two, -1]]
    assert batch.out_rows_M.tolist() == [0, 1, 4, 2, 5, 6, 3]
    assert (batch.twin_rows_W.tolist(), batch.twin_tables_W.tolist()) == (
        [0],
        [1],
    )  # of the second branch, a page begins
    core.cache.join(sequence.lease, 2)
    assert sequence.lease.table[0].tolist() == two
    core.cache.trim(sequence.lease)
    sequence.draft = NO_DRAFT
    core.check()
    drain(core)


def grow_tree(rng: random.Random, truth: List[int], depth: int) -> Draft:
    """A random tree of up to 10 ids, of which some say what comes."""
    ids, parents, depths, right = list[int](), list[int](), list[int](), list[bool]()
    for _ in range(rng.randrange(11)):
        parent = rng.randrange(-1, len(ids))
        level, on_path = (depths[parent] + 1, right[parent]) if parent >= 0 else (0, True)
        if level < depth:
            guess = truth[level] if level < len(truth) and rng.random() < 0.6 else rng.randrange(VOCAB)
            ids.append(guess)
            parents.append(parent)
            depths.append(level)
            right.append(on_path and level < len(truth) and guess == truth[level])
    return Draft(tuple(ids), (), "text", tuple(parents)) if ids else NO_DRAFT


def propose_trees(core: EngineCore, texts: dict[Sequence, list[int]], seed: int = 0) -> None:
    keep_open(core)
    assert core.speculator is not None
    rng = random.Random(seed)

    def draft(sequence: Sequence) -> Draft:
        return grow_tree(rng, texts[sequence][sequence.num_sampled :], sequence.max_tokens - sequence.num_sampled - 1)

    core.speculator._from_text = lambda sequences, terms: {one: found for one in sequences if (found := draft(one)).ids}  # type: ignore[method-assign]


def test_the_same_bits_with_trees_and_without() -> None:
    """Rows 7, 11 and 36: mixed parameters; penalties, grammars and stop state after each branch."""
    plain = run_all(make_core(speculate=False, pages=4096), 120)
    found = run_all(
        make_core(pages=4096, draft_length=16), 120, [sampled(sequence) for sequence in plain], propose_trees
    )
    for index, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert everything(one) == everything(other), index
    assert sum(one.accepted for one in found) > 150
    assert sum(one.drafted - one.accepted for one in found) > 500


@pytest.mark.parametrize(
    "limits",
    [{"rows": 30, "batch": 4}, {"rows": 60, "batch": 8, "pages": 30}, {"windows": (6,)}],
    ids=["chunks", "preemption", "windows"],
)
def test_the_same_bits_in_chunks_with_preemption_and_windows(limits: dict[str, int]) -> None:
    plain = run_all(make_core(speculate=False), 24)
    core = make_core(draft_length=16, **limits)  # type: ignore[arg-type]
    for _ in range(40):
        core._lengths.add(1)
    found = run_all(core, 24, [sampled(sequence) for sequence in plain], propose_trees)
    assert [everything(one)[:8] for one in found] == [everything(other)[:8] for other in plain]
    assert sum(one.accepted for one in found) > 20
    assert ("pages" in limits) == (core.statistics(0).preemptions > 0)


PRECISIONS = {"float32": FULL, "int8": Precision("int8", "int8")}


@cache
def sprout(precision: str) -> tuple[Decoder, Tokenizer]:
    folder = find_model("sprout")
    return load_model(folder, precision=PRECISIONS[precision]).decoder, Tokenizer.load(folder)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_bits_with_trees_on_a_real_model(precision: str) -> None:
    """Also one by one: what a branch leaves in the pages is what plain decoding writes there."""
    decoder, tokenizer = sprout(precision)
    texts = list[list[int]]()
    found = []
    for speculate in ("off", "auto"):
        spec = EngineSpec(page_size=16, kv_tokens=4096, speculate=speculate, draft_length=16)  # type: ignore[arg-type]
        runner = ModelRunner(decoder, spec)
        core = EngineCore(runner, spec, vocab_size=tokenizer.vocab_size, bytes_of=tokenizer.bytes_of)
        by_sequence: dict[Sequence, list[int]] = {}
        if speculate == "auto":
            propose_trees(core, by_sequence)
        sequences = [
            submit(core, tokenizer.encode("Count. " * (index + 3)), seed=index, max_tokens=40) for index in range(4)
        ]
        by_sequence |= dict(zip(sequences, texts, strict=False))
        drain(core)
        texts = [sampled(one) for one in sequences]
        pool, layout = runner._kv[0]
        pages = [pool.view(-1, layout.page_stride)[list(one.lease.pages)] for one in sequences]
        found.append(([everything(one) for one in sequences], pages))
    assert found[0][0] == found[1][0]
    assert sum(one.accepted for one in sequences) > 60
    for pages, expected in zip(found[1][1], found[0][1], strict=True):
        whole = len(pages) - 1
        assert pages[:whole].equal(expected[:whole])


def test_texts_that_disagree_are_drafted_as_a_tree() -> None:
    """The engine's own proposer: what two of three conversations said comes first, and the third is a branch."""
    core = make_core(draft_branches=2)
    keep_open(core)
    assert core.speculator is not None
    sequence = submit(core, [9, 1, 2, 3], max_tokens=30)
    for last in ([5, 6, 9], [5, 7, 8], [5, 7, 8]):
        core.speculator.memory.add(IntArray("i", [1, 2, 3, *last]), 0)
    (draft,) = core.speculator._from_text([sequence], Terms(0.0, 1.0, 8)).values()
    assert draft == Draft((5, 7, 6, 8, 9), (), "text, few agreed, 2 and more", (-1, 0, 0, 1, 2))
    core.abort(sequence)


def test_no_branch_goes_on_beyond_the_end_of_a_turn() -> None:
    """Ids that end the turn are left out, wherever they stand; a branch that has nothing else is none."""
    core = make_core(draft_branches=3)
    keep_open(core)
    assert core.speculator is not None
    sequence = submit(core, [9, 1, 2, 3], max_tokens=30, params=SamplingParams(stop_token_ids=(9,)))
    for last in ([5, 9, 4], [5, 7, 9, 4], [9, 4], [5, 9, 4]):
        core.speculator.memory.add(IntArray("i", [1, 2, 3, *last]), 0)
    (draft,) = core.speculator._from_text([sequence], Terms(0.0, 1.0, 8)).values()
    assert draft == Draft((5, 7), (), "text, split, 2 and more", (-1, 0))
    core.abort(sequence)


def test_a_draft_of_branches_is_no_longer_than_a_chain() -> None:
    core = make_core(draft_branches=3, draft_length=4)
    keep_open(core)
    for seed in range(6):
        submit(core, prompt(1), seed=seed, max_tokens=20)
        drain(core)
    assert core.speculator is not None
    kinds = core.speculator.gate.kinds
    assert any(kind.endswith("not the first choice") for kind in kinds)
    found = core.statistics(0)
    assert found.tokens_drafted <= 4 * found.verifications


def test_pages_for_branches_are_part_of_the_plan() -> None:
    """With too few pages for branches, the step decodes without a draft, and nobody is preempted."""
    core = make_core(pages=7, batch=2)
    keep_open(core)
    assert core.speculator is not None
    core.speculator._from_text = lambda sequences, terms: {one: TREE for one in sequences if one.num_sampled < 5}  # type: ignore[method-assign]
    sequences = [submit(core, [index, 1, 2], seed=index, max_tokens=10) for index in range(2)]
    drain(core)
    assert all(len(sampled(sequence)) == 10 for sequence in sequences)
    assert core.statistics(0).preemptions == 0


def test_branches_go_with_verifiers_that_judge_them() -> None:
    with pytest.raises(
        ValueError, match=r"judges drafts of one branch; set engine.draft_branches to 1, or take coupled"
    ):
        EngineSpec(verifier="block", draft_branches=2)
    params, texts = SamplingParams(temperature=0.3), dict[Sequence, list[int]]()
    core = make_core(verifier="rejection", draft_branches=2, draft_length=16)
    propose_trees(core, texts)
    found = [submit(core, [1, 2, 3], params=params, seed=seed) for seed in range(8)]
    plain = submit(other := make_core(speculate=False), [1, 2, 3], params=params)
    drain(other)
    texts |= dict.fromkeys(found, sampled(plain))
    drain(core)
    assert [len(sampled(one)) for one in found] == [12] * 8
    assert sum(one.accepted for one in found) > 8
