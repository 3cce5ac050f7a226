"""The one clock for durations.

Everything above the engine's step thread measures time with `now()`, so that a whole run executes in virtual time under
trio's mock clock. That clock jumps whenever all tasks wait, also while a thread or a process works, so in virtual time
neither may be started: `refuse_in_virtual_time` is called where one would be.
"""

import sys

import anyio


def now() -> float:
    """Seconds on the event loop's clock."""
    return anyio.current_time()


def is_virtual() -> bool:
    """True inside an event loop whose clock is trio's `MockClock`."""
    trio, testing = sys.modules.get("trio"), sys.modules.get("trio.testing")
    if trio is None or testing is None or not trio.lowlevel.in_trio_run():
        return False
    return isinstance(trio.lowlevel.current_clock(), testing.MockClock)


def seconds_to_wake() -> float:
    """In virtual time, until the next task of the loop goes on by itself: none, if one can already."""
    import trio  # it runs this loop, so it is there

    counts = trio.lowlevel.current_statistics()
    return 0.0 if counts.tasks_runnable else counts.seconds_to_next_deadline


def jump(seconds: float) -> None:
    """In virtual time, move the loop's clock on without a sleep. Whoever does it knows that nobody else acts meanwhile."""
    import trio
    from trio.testing import MockClock

    virtual = trio.lowlevel.current_clock()
    assert isinstance(virtual, MockClock)
    virtual.jump(seconds)


async def sleep_until(when: float) -> None:
    """In virtual time, wait until the clock says `when`, to the bit."""
    import trio

    if when > now():
        await trio.sleep_until(when)
    else:
        await trio.lowlevel.checkpoint()


def refuse_in_virtual_time(what: str) -> None:
    """Raise `RuntimeError` if the loop runs in virtual time: `what` (a thread, a process) takes real time."""
    if is_virtual():
        raise RuntimeError(f"{what} takes real time, and this event loop runs in virtual time (trio's MockClock)")
