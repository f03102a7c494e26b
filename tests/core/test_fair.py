"""Fair order, priorities and shadow mode of a gate."""

import contextlib
import gc
import heapq
import itertools
import math
import random
from collections import Counter

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import AdmissionTimeout, Gate, GateClosed, GateFull, Lease
from lifecycle.testing import assert_quiescent, simulate, simulate_trio

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tenants:
    """Clients that keep a number of requests waiting each, and what they got."""

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
        """Let admitted requests hold for *seconds*, then release, oldest first."""
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
    """A key that holds four times as long gets a quarter as many turns."""
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


async def next_granted(gate: Gate, *keys: str) -> str:
    """Let each of *keys* wait, release what another one holds; return who gets it."""
    granted: list[str] = []

    async def ask(key: str) -> None:
        with await gate.admit(key=key):
            granted.append(key)
            await anyio.sleep_forever()

    other = gate.try_admit(key="other")
    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(ask, key)
            await anyio.wait_all_tasks_blocked()
        other.release()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    (key,) = granted
    return key


@pytest.mark.parametrize(
    ("one", "many", "first"),
    [
        ([3.0] * 40, [0.1] * 150, "many"),
        ([0.1] * 40 + [10.0], [1.0] * 40, "one"),  # a single one counts a quarter
    ],
)
async def test_counts_what_is_held_by_what_its_key_held_before(
    one: list[float], many: list[float], first: str
) -> None:
    """One slot that will be held for long counts for more than five for a moment."""
    clock = Clock()
    gate = Gate(slots=7, order="fair", clock=clock)
    for key, holds in (("one", one), ("many", many)):
        for seconds in holds:
            with gate.try_admit(key=key):
                clock.now += seconds
    with contextlib.ExitStack() as held:
        for key in ("one",) + ("many",) * 5:
            held.enter_context(gate.try_admit(key=key))
        assert await next_granted(gate, "one", "many") == first
    assert_quiescent(gate)


async def test_counts_what_a_new_key_holds_by_what_others_held_before() -> None:
    """Where all hold for a moment, it has not had more than who holds five slots."""
    clock = Clock()
    gate = Gate(slots=7, order="fair", clock=clock)
    for _ in range(40):
        with gate.try_admit(key="short"):
            clock.now += 0.01
    with contextlib.ExitStack() as held:
        for key in ("short",) * 5 + ("new",):
            held.enter_context(gate.try_admit(key=key))
        assert await next_granted(gate, "short", "new") == "new"
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


async def test_counts_the_share_alone_where_none_is_held_for_any_time() -> None:
    """A clock that is set back can take the hold times that are expected to zero."""
    clock = Clock()
    gate = Gate(bytes=4, order="fair", clock=clock)
    with gate.try_admit(bytes=1):
        clock.now -= 3
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        await tenants.ask("base", 1)
        await tenants.ask("large", 4)
        await tenants.ask("small", 1, times=8)
        while tenants.held:
            await tenants.serve(0)
    assert tenants.order.index(("large", 4)) == 1 + 4
    assert_quiescent(gate)


class Market:
    """Keys that always have requests waiting, each of its own sizes and hold times."""

    def __init__(self, gate: Gate, clock: Clock, tasks: anyio.abc.TaskGroup) -> None:
        self.gate = gate
        self.clock = clock
        self.tasks = tasks
        self.wants: dict[str, itertools.cycle[tuple[int, float]]] = {}
        self.had = Counter[str]()
        self.granted: list[tuple[str, int]] = []
        self.open = True
        self._ends: list[tuple[float, int, float, str, Lease]] = []

    async def ask(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            self.tasks.start_soon(self._ask, key)
            await checkpoint()
        await anyio.wait_all_tasks_blocked()

    async def _ask(self, key: str) -> None:
        nbytes, hold_s = next(self.wants[key])
        lease = await self.gate.admit(bytes=nbytes, key=key)
        number, now = len(self.granted), self.clock.now
        self.granted.append((key, nbytes))
        heapq.heappush(self._ends, (now + hold_s, number, now, key, lease))

    async def run(self, until: float) -> None:
        """Let time pass; a key that leaves comes back at once while the market is open."""
        while self._ends and self._ends[0][0] <= until:
            self.clock.now, _, since, key, lease = heapq.heappop(self._ends)
            self.had[key] += lease.bytes * (self.clock.now - since)
            lease.release()
            await anyio.wait_all_tasks_blocked()
            if self.open:
                await self.ask(key)


@pytest.mark.thorough
async def test_gives_equal_byte_seconds_to_equal_tenants() -> None:
    """Jain's index is 0.95 or more, however unequal their sizes and hold times."""
    clock = Clock()
    gate = Gate(bytes=100, order="fair", clock=clock)
    async with anyio.create_task_group() as tasks:
        market = Market(gate, clock, tasks)
        market.wants = {
            "small": itertools.cycle([(2, 0.5)]),
            "long": itertools.cycle([(5, 9.0)]),
            "large": itertools.cycle([(60, 1.0)]),
            "mixed": itertools.cycle([(1, 4.0), (30, 0.2), (90, 1.5), (8, 3.0)]),
        }
        for key in market.wants:
            await market.ask(key, times=12)
        await market.run(until=300.0)
        shares = [market.had[key] for key in market.wants]
        assert sum(shares) ** 2 / (4 * sum(x * x for x in shares)) >= 0.95, shares
        market.open = False
        await market.run(until=math.inf)
    assert_quiescent(gate)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("seed", range(5))
async def test_lets_others_pass_a_large_one_only_so_often(seed: int) -> None:
    """Others overtake by as much as the large one asks for, and no more (B12).

    New keys and old ones keep coming, in sizes and for times of all kinds. (Trio
    runs tasks that are granted together in any order.)
    """
    chance = random.Random(seed)
    clock = Clock()
    gate = Gate(bytes=100, order="fair", clock=clock)
    async with anyio.create_task_group() as tasks:
        market = Market(gate, clock, tasks)
        odd = [(chance.randint(1, 30), chance.uniform(0.1, 3.0)) for _ in range(50)]
        market.wants = {str(n): itertools.cycle(odd[n:]) for n in range(40)}
        market.wants |= {
            "base": itertools.cycle([(60, 10.0)]),
            "large": itertools.cycle([(80, 1.0)]),
        }
        await market.ask("base")
        await market.ask("large")
        for step in range(40):
            await market.ask(str(step), times=3)
            await market.run(until=clock.now + 0.25)
            clock.now += 0.25
        market.open = False
        await market.run(until=math.inf)
        names = [key for key, _ in market.granted]
        before = market.granted[1 : names.index("large")]
        passed = sum(nbytes for _, nbytes in before)
        assert 0 < passed <= 80, before
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
    flows = [o for o in gc.get_objects() if type(o).__name__ == "Flow"]
    assert 0 < len(flows) < 350
    holder.release()
    assert_quiescent(gate)


async def test_forgets_the_oldest_of_too_many_keys() -> None:
    """What the latest have had still counts, beyond eight thousand that left."""
    clock = Clock()
    gate = Gate(slots=1, order="fair", clock=clock)
    for i in range(8193):  # the last one makes room
        with gate.try_admit(key=f"key-{i}"):
            clock.now += 0.1
    flows = [o for o in gc.get_objects() if type(o).__name__ == "Flow"]
    assert 0 < len(flows) < 4200
    served: list[str] = []

    async def ask(key: str) -> None:
        with await gate.admit(key=key):
            served.append(key)

    holder = gate.try_admit()
    async with anyio.create_task_group() as tasks:
        for key in ("key-8191", "key-0"):
            tasks.start_soon(ask, key)
            await anyio.wait_all_tasks_blocked()
        holder.release()
    assert served == ["key-0", "key-8191"]
    assert_quiescent(gate)


@pytest.mark.parametrize("waits", [False, True])
async def test_survives_a_size_beyond_all_floats(waits: bool) -> None:
    """A request of more bytes than a share can tell is refused, and charged nothing."""
    gate = Gate(slots=1, order="fair")
    holder = gate.try_admit() if waits else None
    with pytest.raises(OverflowError):
        await gate.admit(slots=1, bytes=10**400)
    if holder is not None:
        holder.release()
    assert_quiescent(gate)
    with await gate.admit():
        pass


async def test_starts_returning_keys_where_the_others_are() -> None:
    """A key saves up no turns by staying away."""
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


def held_by(gate: Gate, key: str, times: int, **cost: int) -> list[Lease]:
    """Return the leases that *key* gets at once, of so many that it asks for."""
    leases = []
    with contextlib.suppress(GateFull):
        leases.extend(gate.try_admit(key=key, **cost) for _ in range(times))
    return leases


@pytest.mark.parametrize("cost", [{"slots": 1, "bytes": 0}, {"slots": 0, "bytes": 10}])
async def test_keeps_a_reserve_from_a_key_that_has_company(cost) -> None:
    """A flood takes all while it is alone, and leaves the reserve if it is not."""
    clock = Clock()
    gate = Gate(slots=8, bytes=80, order="fair", reserve=0.25, clock=clock)
    for lease in (alone := held_by(gate, "flood", 9, **cost)):
        lease.release()
    assert len(alone) == 8
    served = gate.try_admit(key="other")
    for lease in (beside := held_by(gate, "flood", 9, **cost)):
        lease.release()
    assert len(beside) == 6
    clock.now += 500.0  # which puts its next one behind those of the flood
    served.release()
    flood = held_by(gate, "flood", 9, **cost)
    assert len(flood) == 6
    others = held_by(gate, "other", 9, **cost)
    assert len(others) == 2
    for lease in others:
        lease.release()
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        await tenants.ask("flood", 10, times=3)
        assert tenants.held == []
        # A key that has its share holds up no other, and company lasts for a minute.
        await tenants.ask("other", 20)
        assert [key for key, *_ in tenants.order] == ["other"]
        await tenants.serve(1.0)
        clock.now += 59.0
        flood.pop().release()
        await anyio.wait_all_tasks_blocked()
        assert [key for key, *_ in tenants.order] == ["other", "flood"]
        clock.now += 1.0
        flood.pop().release()
        await anyio.wait_all_tasks_blocked()
        assert len(tenants.held) == 3
        for _ in range(3):
            await tenants.serve(0.0)
    for lease in flood:
        lease.release()
    assert_quiescent(gate)


async def test_admits_alone_what_is_larger_than_the_share_of_one_key() -> None:
    """A reserve makes no request too large: it waits until its key holds nothing."""
    gate = Gate(bytes=100, order="fair", reserve=0.5)
    gate.try_admit(bytes=1, key="other").release()
    small = gate.try_admit(bytes=1, key="key")
    assert held_by(gate, "key", 1, bytes=90) == []
    small.settle(bytes=60)
    assert held_by(gate, "key", 1, bytes=1) == []
    small.settle(bytes=2)
    (more,) = held_by(gate, "key", 1, bytes=48)
    for lease in (more, small):
        lease.release()
    gate.try_admit(bytes=90, key="key").release()
    assert_quiescent(gate)


@pytest.mark.parametrize("run", [simulate, simulate_trio])
def test_grants_the_reserve_once_company_has_left(run) -> None:
    """A key is alone after a minute, though nothing is released then."""

    async def main() -> None:
        gate = Gate(slots=8, order="fair", reserve=0.125)
        gate.try_admit(key="other").release()
        leases = held_by(gate, "key", 8)
        assert len(leases) == 7
        began = anyio.current_time()
        with pytest.raises(AdmissionTimeout, match="full for 59.5 s"):
            await gate.admit(key="key", max_wait=59.5)
        with anyio.fail_after(100):
            leases.append(await gate.admit(key="key"))
        assert anyio.current_time() - began == pytest.approx(60, abs=1.0)
        gate.resize(slots=16)
        gate.try_admit(key="third").release()
        leases += held_by(gate, "key", 8)
        assert len(leases) == 14
        async with anyio.create_task_group() as tasks:
            for cut in (30, 200, 200):
                tasks.start_soon(wait_for, cut, leases)
            await anyio.sleep(50)
            assert gate.statistics().waiting == 2
            gate.try_admit(key="third").release()
            await anyio.sleep(50)
            assert (gate.statistics().waiting, len(leases)) == (2, 14)
            await anyio.sleep(50)
            assert (gate.statistics().waiting, len(leases)) == (0, 16)
        for lease in leases:
            lease.release()
        assert gate.statistics().waiting == 0
        assert_quiescent(gate)

    async def wait_for(seconds: float, leases: list[Lease]) -> None:
        with anyio.move_on_after(seconds):
            leases.append(await leases[0].gate.admit(key="key"))

    run(main, seed=1)


async def test_grants_the_reserve_while_others_wait_with_their_share() -> None:
    """What waits with its share fills no queue, and is no one's turn."""
    gate = Gate(slots=8, order="fair", reserve=0.25, max_waiting=1)
    gate.try_admit(key="other").release()
    leases = held_by(gate, "key", 8)
    assert len(leases) == 6
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Tenants(gate, Clock(), tasks).ask, "key", 1)
        await anyio.wait_all_tasks_blocked()
        assert gate.statistics().waiting == 1
        # Its own come after it, and are refused.
        assert held_by(gate, "key", 1) == []
        leases += held_by(gate, "other", 1)
        with anyio.fail_after(5):
            leases.append(await gate.admit(key="other"))
        assert held_by(gate, "third", 1) == []
        tasks.cancel_scope.cancel()
    assert len(leases) == 8
    for lease in leases:
        lease.release()
    assert_quiescent(gate)


async def test_lets_no_key_starve_its_own_request_beside_a_reserve() -> None:
    """Small ones overtake one beyond the share of their key until it has waited."""
    clock = Clock()
    gate = Gate(bytes=100, order="fair", reserve=0.125, clock=clock)
    gate.try_admit(bytes=1, key="other").release()
    async with anyio.create_task_group() as tasks:
        tenants = Tenants(gate, clock, tasks)
        await tenants.ask("key", 10, times=5)
        await tenants.ask("key", 60)
        for _ in range(20):
            await tenants.ask("key", 10)
            # Those that ask for no wait come after it, and keep no other key waiting.
            if ("key", 60) not in tenants.order:
                assert held_by(gate, "key", 1, bytes=1) == []
            gate.try_admit(bytes=10, key="other").release()
            await tenants.serve(1.0)
        assert 60 in [nbytes for _, nbytes in tenants.order]
        while tenants.held:
            await tenants.serve(1.0)
    assert_quiescent(gate)


async def test_counts_a_key_that_holds_or_waits_as_company() -> None:
    """A key is there for as long as its requests are, not only when they begin."""
    clock = Clock()
    gate = Gate(slots=16, order="fair", reserve=0.125, clock=clock)
    other = gate.try_admit(key="other")
    clock.now += 500.0
    leases = held_by(gate, "key", 16)
    assert len(leases) == 14
    other.release()
    clock.now += 60.0
    leases += held_by(gate, "key", 16)
    assert len(leases) == 16
    for lease in leases:
        lease.release()
    assert_quiescent(gate)


def test_reserves_whole_slots() -> None:
    """One of eight slots is an eighth; of four, nothing is kept."""
    for slots, most in ((1, 1), (4, 4), (8, 7), (15, 14), (16, 14)):
        gate = Gate(slots=slots, order="fair", reserve=0.125)
        gate.try_admit(key="other").release()
        leases = held_by(gate, "key", slots + 1)
        assert len(leases) == most
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("reserve", [-0.1, 1.0, math.nan, "x"])
def test_refuses_a_reserve_out_of_range(reserve: float) -> None:
    """A reserve is a part of the capacity, and not all of it."""
    with pytest.raises((ValueError, TypeError), match="reserve must be"):
        Gate(slots=1, order="fair", reserve=reserve)


def test_refuses_a_reserve_without_keys() -> None:
    """An order that knows no keys has nothing to keep from one."""
    with pytest.raises(ValueError, match="order='fair'"):
        Gate(slots=1, reserve=0.5)


async def test_serves_a_higher_priority_first() -> None:
    """Among waiting requests a higher priority goes before every lower one."""
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
    """enforce=False admits every request at once, and counts those it would not have."""
    gate = Gate(slots=1, bytes=10, max_waiting=0, enforce=False)
    leases = [await gate.admit(bytes=20), await gate.admit(), gate.try_admit(slots=5)]
    now = gate.statistics()
    assert (now.admitted, now.over_limit, now.refused) == (3, 3, 0)
    assert (now.slots_in_use, now.bytes_in_use) == (7, 20)
    for lease in leases:
        lease.release()
    (await gate.admit()).release()
    assert gate.statistics().over_limit == 3
    gate.close()
    with pytest.raises(GateClosed):
        await gate.admit()
    assert_quiescent(gate)
