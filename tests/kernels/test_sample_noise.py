"""The noise of sampling: Philox against its published vectors, and our own numbers pinned."""

import numpy as np
import pytest

from agentrt_kernels.sample import cpu, reference

# Known answers of Random123 (kat_vectors): counter, key, words.
PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

PINNED = [
    0.49751989503403915,
    0.4049853908992632,
    0.7071074386051565,
    0.7025642725057841,
    1.06380598133104,
    0.007325323740918564,
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(reference.philox4x32(np.array([counter], dtype=np.uint64), key)[0].tolist()) == words
    compiled_4L = np.array([counter] * 3, dtype=np.uint64).T.copy()
    cpu.philox(compiled_4L, np.empty((2, 3), dtype=np.uint64), np.uint64(key[1] << 32 | key[0]))
    assert compiled_4L.T.tolist() == [list(words)] * 3


def test_race_times_are_pinned() -> None:
    """A change of these numbers changes every seeded run there is."""
    times = reference.race_times(0x0123456789ABCDEF, 1000, np.array([0, 1, 2, 3, 4, 49151]))
    assert times.tolist() == pytest.approx(PINNED, rel=1e-14)


def test_a_uniform_is_never_0_or_1() -> None:
    lowest, highest = 0.5 / 2**24, (2**24 - 0.5) / 2**24
    assert 0 < lowest < highest < 1
    assert -np.log(highest) > cpu.SHORTEST_RACE


def test_race_times_depend_on_seed_position_id_and_stream() -> None:
    ids = np.arange(100)
    base = reference.race_times(7, 3, ids)
    for other in (
        reference.race_times(8, 3, ids),
        reference.race_times(7, 4, ids),
        reference.race_times(7, 3, ids, stream=1),
    ):
        assert not (base == other).any()
    assert (reference.race_times(7, 3, ids[40:]) == base[40:]).all()
