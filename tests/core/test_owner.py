"""Which request made a lease or a session: the function in the context of a request."""

from contextvars import copy_context
from weakref import ref

import anyio
import anyio.to_thread
import pytest

from lifecycle import Gate, SessionRegistry
from lifecycle.debug import lease_state, payloads
from lifecycle.lowlevel import owner

pytestmark = pytest.mark.anyio


async def test_claims_leases_and_sessions_of_its_context() -> None:
    """What is made in a context, its tasks and its threads is claimed, and no more."""
    gate = Gate(slots=9)
    made: list[object] = []

    async def request() -> None:
        owner.set(made.append)
        lease = await gate.admit()
        session = sessions.open("a")
        assert made == [lease, session]
        await anyio.to_thread.run_sync(lambda: leases.append(gate.try_admit()))
        assert made[2:] == leases
        session.close()
        lease.release()

    leases: list[object] = []
    async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
        tasks.start_soon(request)
    with gate.try_admit():
        assert len(made) == 3
    made.clear()
    leases.pop().release()


async def test_claims_lease_that_waits() -> None:
    """A lease is claimed when it is asked for, and shows that it waits."""
    gate = Gate(slots=1)
    made: list[object] = []

    async def waits() -> None:
        owner.set(made.append)
        (await gate.admit()).release()

    first = gate.try_admit()
    assert lease_state(first) == "held"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits)
        with anyio.fail_after(60):
            while not gate.statistics().waiting:
                await anyio.lowlevel.checkpoint()
        assert lease_state(made[0]) == "waiting"
        first.release()
        assert lease_state(first) == "done"
    assert lease_state(made[0]) == "done"


def test_keeps_no_lease_alive() -> None:
    """Without an owner, and with one that keeps nothing, a lost lease is collectable."""
    gate = Gate(slots=1)
    context = copy_context()
    context.run(owner.set, lambda made: None)
    with pytest.warns(ResourceWarning):
        lost = ref(context.run(gate.try_admit))
    assert lost() is None
    gate.try_admit().release()


async def test_lists_payloads_of_session() -> None:
    """The boxes of a session that are not empty are listed."""
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            box, other = session.box("x", nbytes=3), session.box("y", nbytes=4)
            assert payloads(session) == [box, other]
            box.take()
            assert payloads(session) == [other]
        assert payloads(session) == []
