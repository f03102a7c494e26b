"""Fair order, priorities and shadow mode of a gate."""

import gc
from collections import Counter

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Gate, GateClosed, Lease
from lifecycle.testing import assert_quiescent

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tenants:
    """Clients who keep a number of requests in line each, and what they got."""

    def __init__(self, gate: Gate, clock: Clock, tasks: anyio.abc.TaskGroup) -> None:
        self.gate = gate
        self.clock = clock
        self.tasks = tasks
        self.held: list[tuple[str, int, Lease]] = []
        self.order: list[tuple[str, int]] = []

    async def ask(self, key: str, nbytes: int, times: int = 1) -> None:
        for _ in range(times):
            self.tasks.start_soon(self._ask, key, nbytes)
            await checkpoint()
        await anyio.wait_all_tasks_blocked()

    async def _ask(self, key: str, nbytes: int) -> None:
        lease = await self.gate.admit(bytes=nbytes, key=key)
        self.held.append((key, nbytes, lease))
        self.order.append((key, nbytes))

    async def serve(self, seconds: float) -> None:
        """Let whoever is served hold for *seconds*, then go, oldest first."""
        self.clock.now += seconds
        _key, _nbytes, lease = self.held.pop(0)
        lease.release()
        await anyio.wait_all_tasks_blocked()


async def test_shares_evenly_between_a_flood_and_a_trickle() -> None:
    """A key that asks a hundred times gets no more than one that asks ten times."""
    clock = Clock()
    gate = Gate(slots=1, bytes=100, order="fair", clock=clock)
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        await tenants.ask("flood", 50, times=40)
        await tenants.ask("trickle", 50, times=10)
        for _ in range(20):
            await tenants.serve(1.0)
        served = Counter(key for key, _ in tenants.order[1:21])
        assert abs(served["flood"] - served["trickle"]) <= 2
        while tenants.held:
            await tenants.serve(1.0)
    assert_quiescent(gate)


async def test_counts_what_was_really_held() -> None:
    """Who holds four times as long gets a quarter as many turns."""
    clock = Clock()
    gate = Gate(slots=1, order="fair", clock=clock)
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        for _ in range(40):
            await tenants.ask("long", 0)
            await tenants.ask("short", 0)
        for _ in range(40):
            await tenants.serve(4.0 if tenants.held[0][0] == "long" else 1.0)
        served = Counter(key for key, _ in tenants.order[:40])
        assert 2.5 <= served["short"] / served["long"] <= 5.5
        while tenants.held:
            await tenants.serve(1.0)
    assert_quiescent(gate)


async def test_lets_small_ones_pass_a_large_one_only_so_often() -> None:
    """Others may overtake by as much as the large one asks for, no more (B12)."""
    clock = Clock()
    gate = Gate(bytes=100, order="fair", clock=clock)
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        await tenants.ask("base", 60)
        await tenants.ask("large", 80)
        await tenants.ask("small", 10, times=40)
        passed = 0
        while ("large", 80) not in tenants.order:
            passed = sum(nbytes for key, nbytes in tenants.order if key == "small")
            assert passed <= 80 + 10
            await tenants.serve(0.1)
        assert passed > 0
        while tenants.held:
            await tenants.serve(0.1)
    assert_quiescent(gate)


async def test_remembers_no_more_keys_than_it_needs() -> None:
    """Keys that come once and give up do not pile up behind a gate that is stuck."""
    clock = Clock()
    gate = Gate(slots=1, order="fair", clock=clock)
    for i in range(100):
        with await gate.admit(key=f"served-{i}"):
            clock.now += 0.1
    holder = gate.try_admit()
    for i in range(500):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda i=i: gate.admit(key=f"cancelled-{i}"))
            await checkpoint()
            await checkpoint()
            tasks.cancel_scope.cancel()
    flows = [o for o in gc.get_objects() if type(o).__name__ == "_Flow"]
    assert len(flows) < 350
    holder.release()
    assert_quiescent(gate)


async def test_starts_those_who_come_back_where_the_others_are() -> None:
    """Nobody saves up turns by staying away."""
    clock = Clock()
    gate = Gate(slots=1, order="fair", clock=clock)
    with await gate.admit(key="away"):
        clock.now += 1
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        await tenants.ask("busy", 0, times=30)
        for _ in range(10):
            await tenants.serve(1.0)
        await tenants.ask("away", 0, times=10)
        start = len(tenants.order)
        for _ in range(10):
            await tenants.serve(1.0)
        served = Counter(key for key, _ in tenants.order[start : start + 10])
        assert served["busy"] >= 4
        while tenants.held:
            await tenants.serve(1.0)
    assert_quiescent(gate)


async def test_serves_a_higher_priority_first() -> None:
    """Among those in line a higher priority goes before every lower one."""
    gate = Gate(slots=1)
    order: list[str] = []

    async def request(name: str, priority: int) -> None:
        with await gate.admit(priority=priority):
            order.append(name)
            await checkpoint()

    with gate.try_admit() as holder:
        async with anyio.create_task_group() as tasks:
            for name, priority in (("low", 0), ("high", 5), ("low too", 0), ("top", 9)):
                tasks.start_soon(request, name, priority)
                await anyio.wait_all_tasks_blocked()
            holder.release()
    assert order == ["top", "high", "low", "low too"]
    assert_quiescent(gate)


async def test_only_counts_in_shadow_mode() -> None:
    """enforce=False admits everybody at once, and counts whom it would not have."""
    gate = Gate(slots=1, bytes=10, max_waiting=0, enforce=False)
    leases = [await gate.admit(bytes=20), await gate.admit(), gate.try_admit(slots=5)]
    now = gate.statistics()
    assert (now.admitted, now.overlooked, now.refused) == (3, 3, 0)
    assert (now.slots_in_use, now.bytes_in_use) == (7, 20)
    for lease in leases:
        lease.release()
    (await gate.admit()).release()
    assert gate.statistics().overlooked == 3
    gate.close()
    with pytest.raises(GateClosed):
        await gate.admit()
    assert_quiescent(gate)
