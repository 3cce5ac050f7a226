"""How many pages each cache group has: from a number of tokens, or from what a device has free."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrt.core.errors import UsageError
from agentrt.core.spec import EngineSpec
from agentrt.engine import local
from agentrt.engine.kv.group import Group, Pages, fitted, size_groups
from agentrt_kernels.pages import PageLayout


def test_sizes_come_from_kv_tokens_and_the_windows() -> None:
    spec = EngineSpec(page_size=4, kv_tokens=4001, max_batch=8, step_tokens=64)
    assert size_groups((0,), spec) == (Group(1001),)
    running = 8 * (3 + 2) + 16  # a window of 10 ids in 3 pages, one cut at both ends, and what a step computes
    assert size_groups((0, 10), spec) == (Group(1001), Group(2 * running, 10))
    assert size_groups((0, 10), EngineSpec(page_size=4, kv_tokens=100, max_batch=8, step_tokens=64))[1].num_pages == 25
    branched = msgspec.structs.replace(spec, draft_branches=3, draft_length=8)
    assert size_groups((0, 10), branched)[1].num_pages == 2 * (running + spec.max_batch * 2 * 3)


# Two cache groups, of 1 MiB and 0.5 MiB a page. A window of 32 ids takes at most 2 * (2 * (2 + 2) + 1) = 18 pages, 9 MiB.
WINDOWED = Pages((0, 32), (2**20, 2**19))
SMALL_STEPS = EngineSpec(max_batch=2, step_tokens=16)


def small_steps(kv_tokens: int) -> EngineSpec:
    return msgspec.structs.replace(SMALL_STEPS, kv_tokens=kv_tokens)


def test_pages_that_do_not_fit_a_device_are_refused_with_what_would() -> None:
    """460.8 of 512 MiB are left after a tenth: 451 pages of group 0."""
    with pytest.raises(
        UsageError, match=r"\(16000\) takes 1.0 GiB of the device, of which 0.5 GiB are free; 7216 tokens fit"
    ):
        fitted(small_steps(16_000), [WINDOWED], 2**29)
    assert fitted(small_steps(7216), [WINDOWED], 2**29, staged_bytes=2**29) == small_steps(7216)
    with pytest.raises(UsageError, match="not even one page fits"):
        fitted(small_steps(16), [Pages((0,), (2**20,))], 2**20)


def test_without_a_number_a_device_is_filled_with_room_left_for_new_weights() -> None:
    """460.8 MiB: all, less 100 MiB, and less half of it, for that is the most that is left for new weights."""
    assert fitted(SMALL_STEPS, [WINDOWED], 2**29) == small_steps(16 * 451)
    assert fitted(SMALL_STEPS, [WINDOWED], 2**29, staged_bytes=100 * 2**20) == small_steps(16 * 351)
    assert fitted(SMALL_STEPS, [WINDOWED], 2**29, staged_bytes=2**40) == small_steps(16 * 221)
    head = Pages((0,), (2**20,))
    assert fitted(SMALL_STEPS, [WINDOWED, head], 2**29) == small_steps(16 * 225), "a draft has as many pages"
    with pytest.raises(
        UsageError, match=r"engine.kv_tokens: 0.0 GiB are free on the device and not even one page fits"
    ):
        fitted(SMALL_STEPS, [WINDOWED], 2**20)


@given(
    pages=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=3), min_size=1, max_size=2),
    free=st.integers(0, 10**7), staged=st.integers(0, 10**7), page_size=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_what_fits_fits_and_a_page_more_does_not(
    pages: list[list[int]], free: int, staged: int, page_size: int
) -> None:
    models = [Pages((0, 7, 40)[: len(sizes)], sizes) for sizes in pages]
    spec = EngineSpec(max_batch=3, step_tokens=20, page_size=page_size)
    room = int(free * 0.9)
    room -= min(staged, room // 2)

    def taken(kv_tokens: int) -> int:
        sized = msgspec.structs.replace(spec, kv_tokens=kv_tokens)
        return sum(
            group.num_pages * size
            for model in models
            for group, size in zip(size_groups(model.windows, sized), model.page_bytes, strict=True)
        )

    try:
        tokens = fitted(spec, models, free, staged).pool_tokens
    except UsageError:
        assert taken(page_size) > room
    else:
        assert taken(tokens) <= room < taken(tokens + page_size)


def test_the_cpu_has_its_own_default() -> None:
    assert size_groups((0,), EngineSpec()) == (Group(4096),)
    with pytest.raises(ValueError, match=r"engine.kv_tokens \(65536\) holds not even one page of 100000 tokens"):
        EngineSpec(page_size=100_000)
    with pytest.raises(ValueError, match=r"engine.kv_tokens must be above 0, not 0"):
        EngineSpec(kv_tokens=0)


def test_an_engine_on_a_gpu_looks_at_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 MiB a tenth is left, and of the rest the weights twice: 943,718 - 2 * 100,000 bytes are 60 pages of 12 KiB."""

    def model(device: str) -> Any:
        return SimpleNamespace(
            device=torch.device(device), dtype=torch.bfloat16, num_parameters=50_000, windows=(0,),
            page_layouts=lambda page_size: (PageLayout(page_size, num_layers=3, kv_heads=2, head_dim=32),),
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**30))
    assert local.sized(EngineSpec(), model("cuda"), None).kv_tokens == 16 * 60
    assert local.sized(EngineSpec(), model("cuda"), model("cuda")).kv_tokens == 16 * 30
    assert local.sized(EngineSpec(kv_tokens=160), model("cuda"), None).kv_tokens == 160
    assert local.sized(EngineSpec(), model("cpu"), None) == EngineSpec()
