"""TicketGate: requests that no task waits for, beside those of tasks."""

import threading

import anyio
import pytest

from lifecycle import (
    AdmissionTimeout,
    CostTooLarge,
    Gate,
    GateClosed,
    GateFull,
)
from lifecycle._queues import HELD, WAITING, Ticket
from lifecycle._ticket_gate import TicketGate
from lifecycle.testing import assert_quiescent


class Bell:
    """A waiter that counts, and may be gone."""

    def __init__(self, there=True):
        self.there, self.rung, self.on_ring = there, 0, lambda: None

    def wake(self):
        self.rung += 1
        self.on_ring()
        return self.there


def ticket(slots=1, nbytes=0, key=None, priority=0):
    made = Ticket()
    made.slots, made.bytes, made.key, made.priority = slots, nbytes, key, priority
    return made


def test_holds_at_once_what_fits() -> None:
    """A ticket that fits is held when `submit` returns, and no bell rings."""
    gate = Gate(slots=1)
    tickets, first, bell = TicketGate(gate), ticket(), Bell()
    assert tickets.submit(first, bell)
    assert first.state == HELD and bell.rung == 0
    assert gate.statistics().slots_in_use == 1
    tickets.give_back(first)
    tickets.give_back(first)
    assert_quiescent(gate)


def test_rings_once_when_a_waiting_ticket_is_granted() -> None:
    """Who waits is told by its callback, and then asks what came of it."""
    gate = Gate(slots=1)
    tickets, first, second, bell = TicketGate(gate), ticket(), ticket(), Bell()
    assert tickets.submit(first, Bell())
    assert not tickets.submit(second, bell)
    assert second.state == WAITING
    tickets.give_back(first)
    assert second.state == HELD and bell.rung == 1
    assert tickets.outcome(second) is None
    tickets.give_back(second)
    assert_quiescent(gate)


async def grab(gate, got):
    with await gate.admit():
        got.append("task")


@pytest.mark.anyio
async def test_shares_one_queue_with_tasks() -> None:
    """Tickets and tasks are granted in the order in which they came."""
    gate, got = Gate(slots=1), []
    tickets, first, bell = TicketGate(gate), ticket(), Bell()
    bell.on_ring = lambda: got.append("ticket")
    lease = gate.try_admit()
    async with anyio.create_task_group() as tasks:
        assert not tickets.submit(first, bell)
        tasks.start_soon(grab, gate, got)
        await anyio.wait_all_tasks_blocked()
        lease.release()
        assert got == ["ticket"]
        tickets.outcome(first)
        tickets.give_back(first)
    assert got == ["ticket", "task"]
    assert_quiescent(gate)


def test_is_not_overtaken_before_it_knows() -> None:
    """A granted ticket keeps its mark until its outcome was asked for, as a task does."""
    gate = Gate(slots=2)
    tickets, big, later = TicketGate(gate), ticket(2), ticket()
    lease = gate.try_admit()
    assert not tickets.submit(big, Bell())
    tickets.give_back(big)
    assert tickets.submit(later, Bell())
    tickets.give_back(later)
    assert not tickets.submit(big, Bell())
    lease.release()
    assert not tickets.submit(later, Bell())
    tickets.outcome(big)
    tickets.give_back(big)
    tickets.outcome(later)
    assert later.state == HELD
    assert tickets.submit(ticket(), Bell())


def test_grants_nothing_to_who_is_gone() -> None:
    """A callback that says it is gone gets nothing, and the next one does."""
    gate = Gate(slots=1)
    tickets, gone, there = TicketGate(gate), ticket(), ticket()
    lease = gate.try_admit()
    tickets.submit(gone, Bell(there=False))
    tickets.submit(there, Bell())
    lease.release()
    assert gone.state != HELD and there.state == HELD
    assert gate.statistics().slots_in_use == 1
    assert gate.statistics().cancelled == 1


def test_refuses_as_the_gate_does() -> None:
    """Refusals are raised by `submit`, or are the outcome of a ticket that waited."""
    gate = Gate(slots=2, max_waiting=1)
    tickets, waits, bell = TicketGate(gate), ticket(), Bell()
    lease = gate.try_admit(slots=2)
    with pytest.raises(CostTooLarge):
        tickets.submit(ticket(3), Bell())
    with pytest.raises(GateFull):
        tickets.submit(ticket(), None)
    assert not tickets.submit(waits, bell)
    with pytest.raises(GateFull, match="queue of 1"):
        tickets.submit(ticket(), Bell())
    gate.close()
    assert bell.rung == 1
    assert isinstance(tickets.outcome(waits), GateClosed)
    assert tickets.outcome(waits) is None
    with pytest.raises(GateClosed):
        tickets.submit(ticket(), Bell())
    lease.release()
    assert_quiescent(gate)
    assert gate.statistics().refused == 5


def test_expires_what_waits_and_nothing_else() -> None:
    """A ticket is refused once for its deadline, and not where its grant came first."""
    gate = Gate(slots=1)
    tickets, late, bell = TicketGate(gate), ticket(), Bell()
    lease = gate.try_admit()
    tickets.submit(late, bell)
    tickets.expire(late, 2.0)
    tickets.expire(late, 2.0)
    assert bell.rung == 1
    refusal = tickets.outcome(late)
    assert isinstance(refusal, AdmissionTimeout)
    assert refusal.retry_after >= 1 and "2.0 s" in str(refusal)
    tickets.expire(late, 2.0)
    assert bell.rung == 1
    tickets.submit(late, bell)
    lease.release()
    tickets.expire(late, 2.0)
    assert bell.rung == 2
    assert tickets.outcome(late) is None and late.state == HELD
    assert gate.statistics().refused == 1


def test_forgets_a_refusal_that_nobody_asks_for() -> None:
    """A ticket given back after its refusal leaves nothing behind."""
    gate = Gate(slots=1)
    tickets, late = TicketGate(gate), ticket()
    lease = gate.try_admit()
    tickets.submit(late, Bell())
    tickets.expire(late, 1.0)
    tickets.give_back(late)
    assert tickets.outcome(late) is None
    lease.release()
    with gate.try_admit():
        pass
    assert_quiescent(gate)


def test_charges_what_was_granted_elsewhere() -> None:
    """A forced charge may exceed the capacity; nothing is granted until it is repaid."""
    gate = Gate(slots=1, bytes=10)
    tickets, one, two = TicketGate(gate), ticket(1, 8), ticket(1, 8)
    tickets.charge(one)
    tickets.charge(two)
    assert gate.statistics().bytes_in_use == 16
    tickets.give_back(one)
    with pytest.raises(GateFull):
        gate.try_admit()
    tickets.settle(two, 3)
    assert gate.statistics().bytes_in_use == 3
    tickets.give_back(two)
    tickets.settle(two, 3)
    assert_quiescent(gate)


def test_counts_what_a_gate_in_shadow_admits() -> None:
    """With ``enforce=False`` a ticket is held at once, and leaves no mark."""
    gate = Gate(slots=1, enforce=False)
    tickets, one, two, bell = TicketGate(gate), ticket(), ticket(), Bell()
    assert tickets.submit(one, bell) and tickets.submit(two, bell)
    assert gate.statistics().over_limit == 1 and bell.rung == 0
    tickets.give_back(one)
    tickets.give_back(two)
    assert tickets.submit(one, None)


def test_fits_again_when_a_key_is_alone() -> None:
    """A reserve opens with time, not with a release: `recheck` looks again."""
    now = [0.0]
    gate = Gate(slots=10, order="fair", reserve=0.5, clock=lambda: now[0])
    tickets, a, more = TicketGate(gate), ticket(5, key="a"), ticket(4, key="a")
    other = ticket(1, key="b")
    for each in (other, a):
        assert tickets.submit(each, Bell())
    tickets.give_back(other)
    assert not tickets.submit(more, Bell())
    tickets.recheck()
    assert more.state == WAITING
    now[0] = 100.0
    tickets.recheck()
    assert more.state == HELD


def test_waits_for_a_change_of_another_thread() -> None:
    """A ticket comes after a change that has begun, however slow its thread is."""
    inside, go_on = threading.Event(), threading.Event()

    def clock() -> float:
        inside.set()
        go_on.wait(20)
        return 0.0

    def refuse() -> None:
        with pytest.raises(GateFull):
            gate.try_admit()

    gate = Gate(slots=1, clock=clock)
    tickets, first, second = TicketGate(gate), ticket(), ticket()
    assert tickets.submit(first, Bell())
    thread = threading.Thread(target=refuse)
    thread.start()
    assert inside.wait(20)
    threading.Timer(0.02, go_on.set).start()
    assert not tickets.submit(second, Bell())
    assert go_on.is_set()
    thread.join()
    tickets.give_back(second)
    tickets.give_back(first)
    assert_quiescent(gate)


def test_refuses_in_the_middle_of_a_change() -> None:
    """A request from a finaliser that interrupts the gate is refused, not half made."""
    refused = []

    class Odd(str):
        __slots__ = ()

        def __hash__(self):
            with pytest.raises(GateFull, match="interrupted"):
                tickets.submit(ticket(), Bell())
            refused.append(self)
            return super().__hash__()

    gate = Gate(slots=1)
    tickets = TicketGate(gate)
    with gate.try_admit(key=Odd("odd")):
        with pytest.raises(GateFull):
            tickets.submit(ticket(key=Odd("odd")), None)
    assert refused
    assert_quiescent(gate)
