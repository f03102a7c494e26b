"""The fence between epochs, and what a leader makes of workers that behave oddly."""

import contextlib
import resource
import selectors
import socket
import sys
import threading
import time
from functools import partial

import anyio
import pytest
from descriptors import descriptors_before, open_descriptors
from shared_kit import Workers, follows, leads, queued, stalled, until, wait_until

from lifecycle import GateClosed, GateFull
from lifecycle.shared import leader as leader_module, member as member_module, wire
from lifecycle.shared.rows import (
    ADMITTED,
    BEATS,
    CAPACITY_SINCE,
    EPOCH,
    IDENT,
    SLOTS,
    Capacity,
    Folder,
    Row,
)
from lifecycle.shared.wire import Connection

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="OFD locks"),
]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def workers(tmp_path, monkeypatch):
    # However busy the machine is, nobody is deposed, but where a test asks for it.
    monkeypatch.setattr(member_module, "_PATIENCE", 600)
    made = Workers(tmp_path / "gate")
    yield made
    made.close()


def impatient(gate):
    """Let this worker depose a leader that gives no sign of life, as all do."""
    gate._member._patience = 5


def cut(gate):
    """End the connection of a follower, as the system may for any reason."""
    gate._member._link.sock.shutdown(socket.SHUT_RDWR)


def test_voids_a_grant_of_an_older_epoch(workers) -> None:
    """A leader that was stopped believes to lead, and its grants do not count."""
    a, b = workers.two(slots=1)
    impatient(b)
    with stalled(a):
        wait_until(lambda: leads(b))
        with b.try_admit():
            assert leads(a)
            with pytest.raises(GateFull):
                a.try_admit()
            assert b.statistics().slots_in_use == 1
    wait_until(lambda: follows(a))
    a.try_admit().release()


def test_takes_no_grant_for_one_that_waits_no_more(workers) -> None:
    """The cancellation is on its way to the leader, who takes the grant back."""
    a, b = workers.two(slots=1)
    for gate in (a, b):
        gate._member.decide(10**9, None, 1)
        assert gate.statistics().slots_in_use == 0
        gate.try_admit().release()


def test_writes_before_it_looks(workers, monkeypatch) -> None:
    """An epoch that begins after the look finds the row written."""
    a, b = workers.two(slots=1)
    impatient(b)
    look = a._member.folder.has_epoch

    def look_and_sleep(epoch):
        found = look(epoch)
        wait_until(lambda: leads(b))
        return found

    with stalled(a):
        monkeypatch.setattr(a._member.folder, "has_epoch", look_and_sleep)
        lease = a.try_admit()
        monkeypatch.undo()
        with pytest.raises(GateFull):
            b.try_admit()
    lease.release()


def test_reads_rows_after_it_has_linked(workers, monkeypatch) -> None:
    """What was accepted just before the link is counted by the new leader."""
    a, b = workers.two(slots=1)
    impatient(b)
    elect, held = b._member.folder.elect, []

    def grant_and_elect(row, epoch):
        held.append(a.try_admit())
        return elect(row, epoch)

    with stalled(a):
        monkeypatch.setattr(b._member.folder, "elect", grant_and_elect)
        wait_until(lambda: leads(b))
        with pytest.raises(GateFull):
            b.try_admit()
    held[0].release()


async def test_takes_no_end_of_a_connection_for_death(workers) -> None:
    """A worker without a connection holds what it held, until its row is unlocked."""
    a, b = workers.two(slots=1)
    lease = await b.admit()
    with stalled(b):
        cut(b)
        await until(lambda: not a._member.leader._peers)
        with pytest.raises(GateFull):
            a.try_admit()
    await until(lambda: a._member.leader._peers)
    lease.release()
    (await a.admit()).release()


async def hold(gate, got, **cost):
    got.append(await gate.admit(**cost))


async def test_greets_without_a_gap(workers) -> None:
    """While a worker greets anew, nobody gets what it holds."""
    a, b = workers.two(slots=1)
    lease, got = await b.admit(), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, a, got)
        await until(lambda: a.statistics().waiting)
        peers = a._member.leader._peers
        (before,) = peers.values()
        cut(b)
        await until(lambda: peers and before not in peers.values())
        await until(lambda: follows(b))
        assert a.statistics().waiting == 1 and not got
        lease.release()
        await until(lambda: got)
        got[0].release()


async def test_grants_to_others_beside_a_silent_worker(workers) -> None:
    """Grants that nobody takes are void by a new epoch, and others get in."""
    a, b = workers.two(slots=2)
    lease, got = await a.admit(slots=2), []
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(hold, b, got)
        await until(lambda: queued(workers) == 4)
        with stalled(b):
            lease.release()
            lease = await a.admit(slots=2)
            assert not got and a._member.epoch > 1
        await until(lambda: a.statistics().waiting == 4)
        lease.release()
        for number in range(4):
            await until(lambda number=number: len(got) > number)
            got[number].release()


async def test_keeps_the_next_epoch_for_who_sleeps(workers) -> None:
    """The link that a sleeping worker will look for stays until it has woken."""
    a, b = workers.two(slots=1)
    c = workers(slots=1)
    (await c.admit()).release()
    with stalled(b):
        a.close()
        await until(lambda: leads(c))
        d = workers(slots=1)
        (await d.admit()).release()
        c.close()
        await until(lambda: leads(d))
        assert d._member.epoch == 3
        assert b._member.folder.has_epoch(2) and not b._member.folder.has_epoch(1)
    await until(lambda: follows(b) and b._member.epoch == 3)
    (await b.admit()).release()


def test_counts_its_own_looks(workers) -> None:
    """However long ago the last sign of life was: it takes five looks to depose."""
    a, b = workers.two(slots=1)
    member = b._member
    impatient(b)
    with stalled(a), stalled(b):
        member._tick_at += 3600
        member._tick()  # the first one after a sign of life, perhaps
        member._missed = 0
        for missed in range(1, 5):
            member._tick()
            assert member._missed == missed and not member._seeks
        member._tick()
        assert member._seeks
    wait_until(lambda: leads(a) or leads(b))
    member._tick_at = 0.0


async def test_deposes_a_leader_that_does_not_listen(workers, monkeypatch) -> None:
    """A leader that lives and cannot be reached is replaced."""
    a, b = workers.two(slots=1)
    with stalled(a):
        monkeypatch.setattr(member_module, "_MOST_RETRIES", 3)
        a._member.leader._listener.close()
        cut_from_below(b)
        await until(lambda: leads(b))
    await until(lambda: follows(a))


def test_looks_for_a_leader_at_its_own_pace(workers, monkeypatch) -> None:
    """A look that falls on one for signs of life is not the last for so long."""
    monkeypatch.setattr(member_module, "_MOST_RETRIES", 10**9)
    workers.folder.mkdir(mode=0o700)
    (workers.folder / "leader.7").touch()  # cut short by a crash of the host
    gate = workers(slots=1)
    gate.statistics()
    member = gate._member
    with stalled(gate):
        member._tick_at = member._seek_at = 0.0
        assert member._turn() < member_module.TICK / 2
        assert member._seeks


async def test_leads_after_a_leader_that_a_crash_of_the_host_cut_short(workers) -> None:
    """What is left of it leads nobody, and stops nobody."""
    workers.folder.mkdir(mode=0o700)
    (workers.folder / "leader.7").touch()
    a, b = workers(slots=1), workers(slots=1)
    (await a.admit()).release()
    (await b.admit()).release()


def cut_from_below(gate):
    with contextlib.suppress(OSError):
        cut(gate)


async def test_is_patient_after_a_leader_that_lives(workers) -> None:
    """Who has deposed a live leader waits longer for the next, until all is calm."""
    a, b = workers.two(slots=1)
    impatient(b)
    with stalled(a):
        await until(lambda: leads(b))
    assert b._member._patience == 10
    await until(lambda: follows(a))
    impatient(a)
    with stalled(b):
        await until(lambda: leads(a))
    await until(lambda: follows(b))
    assert a._member._patience == b._member._patience == 10

    def is_calm():
        b._member._calm = 10_000
        return b._member._patience == 600

    await until(is_calm)


def test_makes_no_other_change_in_the_middle_of_one(workers) -> None:
    """A request that is cancelled while its leader opens is not granted after that."""
    gate = workers(slots=1)
    gate.try_admit().release()
    member, made = gate._member, []
    with member.locked():
        other = threading.Thread(target=gate._apply, args=(made.append, 1))
        other.start()
        other.join(60)
        with member.locked():
            assert not made
        assert not made
    assert made == [1]


async def test_takes_over_while_a_capacity_is_written(workers, monkeypatch) -> None:
    """What a row says of the capacity may be gone a moment later."""
    a, b = workers.two(slots=1)
    c = workers(slots=1)
    (await c.admit()).release()
    read, seen = Row.capacity.fget, set()

    def read_once(row):
        found = None if row in seen else read(row)
        seen.add(row)
        return found

    monkeypatch.setattr(Row, "capacity", property(read_once))
    a.close()
    await until(lambda: leads(b) or leads(c) or b._member.cut_off or c._member.cut_off)
    for each in (b, c):
        (await each.admit()).release()


async def test_leads_with_a_capacity_set_as_it_is_elected(workers, monkeypatch) -> None:
    """A capacity that comes while a new leader makes its gate is that gate's as well."""
    a, b = workers.two(slots=1)
    make = b._member._engine

    def make_late(capacity):
        b.resize(slots=2)
        return make(capacity)

    monkeypatch.setattr(b._member, "_engine", make_late)
    a.close()
    await until(lambda: leads(b))
    with b.try_admit(), b.try_admit(), pytest.raises(GateFull):
        b.try_admit()


async def test_keeps_a_capacity_whose_worker_ends_at_once(workers) -> None:
    """What was resized is so, though a leader leaves before it could tell anybody."""
    a, b = workers.two(slots=1)
    a.resize(slots=2)
    a.close()
    await until(lambda: leads(b))
    with b.try_admit(), b.try_admit(), pytest.raises(GateFull):
        b.try_admit()


@pytest.mark.parametrize(("later", "slots"), [(0, 5), (3600, 1)])
async def test_buries_who_died_before_it_greeted(workers, later, slots) -> None:
    """Its row goes, and the capacity that it set stays: but for that of another boot."""
    gate = workers(slots=1)
    (await gate.admit()).release()
    folder = Folder(gate.folder)
    row = folder.join()
    row.write_capacity(Capacity(time.monotonic_ns() + later * 10**9, 5, None))
    row.close()
    await until(lambda: len(list(workers.folder.glob("row.*"))) == 1)
    folder.close()
    assert gate.statistics().slots == slots


async def test_counts_once_what_it_could_not_bury(workers, monkeypatch) -> None:
    """Where the row of a dead worker cannot be removed yet, nothing counts twice."""
    a, b = workers.two(slots=1)
    b.try_admit().release()
    remove, failed = a._member.folder.remove, []

    def fail_once(row):
        if not failed:
            failed.append(OSError("no descriptors are left"))
            raise failed[0]
        remove(row)

    monkeypatch.setattr(a._member.folder, "remove", fail_once)
    b.close()
    await until(lambda: failed and leads(a))
    await until(lambda: len(list(workers.folder.glob("row.*"))) == 1)
    assert a.statistics().admitted == 1


async def test_lets_one_of_two_candidates_lead(workers, monkeypatch) -> None:
    """Who comes second in an election follows who came first."""
    a, b = workers.two(slots=1)
    elect = b._member.folder.elect

    def come_second(row, epoch):
        other = Folder(b.folder)
        rival = other.join()
        assert other.elect(rival, epoch)
        rival.close()  # and dies
        other.close()
        monkeypatch.undo()
        return elect(row, epoch)

    monkeypatch.setattr(b._member.folder, "elect", come_second)
    a.close()
    await until(lambda: leads(b))
    assert b._member.epoch == 3


async def test_skips_an_epoch_that_was_forgotten_while_it_looked(
    workers, monkeypatch
) -> None:
    """A link that is gone by the time it is opened means that there is a newer one."""
    _, b = workers.two(slots=1)
    newest = b._member.folder.newest_epoch
    stale = [77]
    monkeypatch.setattr(
        b._member.folder, "newest_epoch", lambda: stale.pop() if stale else newest()
    )
    cut(b)
    await until(lambda: not stale and follows(b))
    (await b.admit()).release()


async def test_admits_no_more_when_its_row_is_removed(workers) -> None:
    """In a folder that is emptied nobody can be elected, and nothing breaks."""
    a, b = workers.two(slots=1)
    b._member.folder.remove(b._member.row)
    a.close()
    await until(lambda: not follows(b))
    workers.folder.rename(workers.folder.with_name("old"))
    await until(lambda: b._member.cut_off)
    with pytest.raises(GateClosed):
        await b.admit()


class Raw:
    """A worker that speaks the frames by hand."""

    def __init__(self, gate):
        self.folder = Folder(gate.folder)
        self.row = self.folder.join()
        self.ident, self.links = self.row.words[IDENT], []
        self.connect(gate)

    def connect(self, gate):
        sock = socket.socket(socket.AF_UNIX)
        leader = gate._member.row.words
        sock.connect(self.folder.socket_path(leader[IDENT], leader[EPOCH]))
        self.link = Connection(sock)
        self.links.append(self.link)

    def hello(self, held=(), waiting=()):
        self.row.words[EPOCH] = 1
        capacity = 1, 1, None
        self.say(
            wire.HELLO, wire.VERSION, self.ident, capacity, list(held), list(waiting)
        )

    def say(self, *frame):
        self.link.put(*frame)
        wait_until(lambda: not self.link.flush())

    def hear(self):
        frames = []
        wait_until(lambda: frames.extend(self.link.read()) or frames or self.link.ended)
        return frames

    def close(self):
        for each in self.links:
            each.close()
        self.row.close()
        self.folder.close()


@pytest.fixture
def raw(workers):
    gate = workers(slots=1)
    gate.try_admit().release()
    made = []

    def make():
        made.append(Raw(gate))
        return gate, made[-1]

    yield make
    for each in made:
        each.close()


async def test_sees_who_died_and_whose_connection_lives(raw) -> None:
    """A child of another program may have the connection, and has no lock."""
    gate, odd = raw()
    odd.row.add(1, 0)
    odd.hello(held=[(1, 1, 0, None)])
    await until(lambda: gate._member.leader._peers)
    await until(lambda: not granted(gate))
    odd.row.close()
    (await gate.admit(max_wait=60)).release()
    assert not gate._member.leader._peers


ASK = (wire.ASK, 1, 0.0, 1, 0, None, 0, True)


def test_takes_back_an_untaken_grant_of_the_dead(raw) -> None:
    """A worker that dies with a grant in its connection held nothing."""
    gate, odd = raw()
    odd.hello()
    assert odd.hear()[0][0] == wire.CAPACITY
    odd.say(*ASK)
    assert odd.hear() == [[wire.GRANT, 1]]
    odd.close()
    wait_until(lambda: granted(gate))


def granted(gate):
    try:
        gate.try_admit().release()
    except GateFull:
        return False
    return True


def test_takes_back_what_a_stopped_worker_lost_with_its_connection(raw) -> None:
    """A grant that was lost on its way goes to others, though its worker is stopped."""
    gate, odd = raw()
    odd.hello()
    odd.hear()
    odd.say(*ASK)
    assert odd.hear() == [[wire.GRANT, 1]]
    odd.link.close()  # and its row stays locked
    wait_until(lambda: granted(gate))


def test_takes_back_what_a_stopped_worker_has_released(raw) -> None:
    """What a worker gave back without a word goes to others: its row is the truth."""
    gate, odd = raw()
    odd.row.add(1, 0)
    odd.hello([(1, 1, 0, None)])
    odd.hear()
    odd.row.add(-1, 0)  # and it is stopped before it tells
    wait_until(lambda: granted(gate))


def test_leaves_a_worker_alone_that_has_taken_its_grants(raw) -> None:
    """A worker that says nothing and holds what its row says is not silent."""
    gate, quiet = raw()
    quiet.hello()
    quiet.hear()
    quiet.row.add(1, 0)
    quiet.say(*ASK)
    quiet.hear()
    beats = gate._member.row.words[BEATS]
    wait_until(lambda: gate._member.row.words[BEATS] > beats + 15)  # it was looked at
    assert gate._member.epoch == 1


def test_drops_who_speaks_otherwise(raw) -> None:
    """What is no frame ends the connection, and the gate goes on."""
    for text in (b"GET / HTTP/1.1\n\n", b"[0, 1]\n", b"[5]\n", b"7\n", b"[99, 1]\n"):
        gate, odd = raw()
        odd.link.sock.send(text)
        if text == b"[99, 1]\n":  # of a later version, perhaps: ignored
            odd.hello()
            assert odd.hear()[0][0] == wire.CAPACITY
        else:
            assert odd.hear() == [] and odd.link.ended
        gate.try_admit().release()


def test_drops_the_last_words_of_the_dead(raw) -> None:
    """A greeting of a worker that was buried by now is dropped."""
    gate, odd = raw()
    odd.folder.remove(odd.row)
    odd.hello()
    assert odd.hear() == [] and odd.link.ended
    gate.try_admit().release()


def test_drops_another_user(raw, monkeypatch) -> None:
    """A process of another user is not heard."""
    gate, odd = raw()
    monkeypatch.setattr(leader_module, "is_of_this_user", lambda sock: False)
    odd.connect(gate)
    assert odd.hear() == [] and odd.link.ended


async def test_follows_no_leader_of_another_user(workers, monkeypatch) -> None:
    """A worker asks nobody who runs as another user, and leads at last."""
    _, b = workers.two(slots=1)
    monkeypatch.setattr(member_module, "_MOST_RETRIES", 3)
    monkeypatch.setattr(member_module, "is_of_this_user", lambda sock: False)
    cut(b)
    await until(lambda: leads(b))
    assert wire.is_of_this_user(b._member.leader._listener)


def test_voids_a_grant_that_is_on_its_way(workers) -> None:
    """A grant that was sent before a newer epoch, and is read after, does not count."""
    a, b = workers.two(slots=1)
    lease, got = a.try_admit(), []
    waits = threading.Thread(target=lambda: got.append(anyio.run(b.admit)))
    waits.start()
    wait_until(lambda: has_waiting(a))
    folder = Folder(a.folder)
    rival = folder.join()
    with stalled(a), stalled(b):
        for each in (a, b):  # neither looks by itself
            each._member._tick_at += 3600
        assert folder.elect(rival, 2)
        lease.release()
    wait_until(lambda: b._member._seeks)
    assert not got and b.statistics().slots_in_use == 0
    for each in (a, b):
        each._member._tick_at = 0.0
    rival.close()
    folder.close()
    waits.join(60)
    got[0].release()


def test_gives_nothing_to_who_is_being_lost(raw) -> None:
    """A grant that falls due while a connection ends goes to who waits next."""
    gate, odd = raw()
    odd.hello()
    odd.hear()
    gate.resize(slots=2)
    lease = gate.try_admit()
    odd.say(wire.ASK, 1, 0.0, 2, 0, None, 0, True)
    odd.say(wire.ASK, 2, 0.0, 1, 0, None, 0, True)  # fits once the first one is gone
    (peer,) = gate._member.leader._peers.values()
    wait_until(lambda: len(peer.tickets) == 2)
    odd.link.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: peer.gone)
    wait_until(lambda: granted(gate))
    assert not peer.tickets
    lease.release()


def test_gives_back_what_was_decided_for_who_was_just_lost(raw) -> None:
    """Grants and refusals that are not sent yet are void with the connection."""
    gate, one = raw()
    _, two = raw()
    for each in (one, two):
        each.hello()
        each.hear()
    one.row.add(1, 0)
    one.say(*ASK)
    assert [wire.GRANT, 1] in one.hear()
    two.say(*ASK)
    two.say(wire.ASK, 2, 0.0, 1, 0, None, 0, True)
    peer = gate._member.leader._peers[two.ident]
    wait_until(lambda: len(peer.tickets) == 2)
    old = two.link
    two.connect(gate)
    wait_until(lambda: gate._member.leader._strangers)
    with stalled(gate):  # then all of this is read in one batch
        one.row.add(-1, 0)
        one.say(wire.RELEASE, 1)
        old.put(wire.EXPIRE, 2, 1.0)
        old.flush()
        two.link.put(wire.HELLO, wire.VERSION, two.ident, (1, 1, None), [], [])
        two.link.flush()
    wait_until(lambda: peer.gone)
    wait_until(lambda: granted(gate))


def test_gives_back_a_grant_that_was_not_sent(raw) -> None:
    """What is granted in the moment in which a connection ends is free, without a word."""
    gate, one = raw()
    _, two = raw()
    for each in (one, two):
        each.hello()
        each.hear()
    one.row.add(1, 0)
    one.say(*ASK)
    assert [wire.GRANT, 1] in one.hear()
    two.say(*ASK)
    leader = gate._member.leader
    wait_until(lambda: leader._peers[two.ident].tickets)
    with stalled(gate):
        one.row.add(-1, 0)
        one.say(wire.RELEASE, 1)
        two.link.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: granted(gate))
    assert gate._member.leader is leader  # and without a new epoch


def test_hears_an_older_connection_no_more(raw) -> None:
    """What an older connection says in the moment of a new greeting is not heard."""
    gate, odd = raw()
    odd.hello()
    odd.hear()
    old = odd.link
    odd.connect(gate)
    wait_until(lambda: gate._member.leader._strangers)
    with stalled(gate):
        odd.hello()
        old.put(*ASK)
        old.flush()
    odd.hear()
    gate.try_admit().release()


def test_sends_nothing_to_a_connection_that_has_ended() -> None:
    """The end of a connection is read, and never raised where something is sent."""
    here, there = map(Connection, socket.socketpair())
    there.close()
    here.put(wire.CANCEL, 1)
    assert not here.flush()
    assert here.read() == [] and here.ended
    here.close()


def test_forgets_the_rest_of_who_was_dropped(raw) -> None:
    """What comes behind the last words of the dead is not heard, whatever it is."""
    for text in (b"[2, 1]\n", b"7\n"):
        gate, odd = raw()
        odd.folder.remove(odd.row)
        words = b"[0, 1, %d, [1, 1, null], [], []]\n" % odd.ident
        odd.link.sock.send(words + text)
        assert odd.hear() == [] and odd.link.ended
        gate.try_admit().release()


def test_accepts_nothing_where_nobody_connects(raw) -> None:
    """A connection that is gone before it was accepted is no error."""
    gate, _ = raw()
    with stalled(gate):
        gate._member.leader._accept()  # the first one
        gate._member.leader._accept()
    gate.try_admit().release()


def test_leaves_no_folder_open_where_it_cannot_join(tmp_path, monkeypatch) -> None:
    """An error while it joins leaves nothing behind, and the next request tries anew."""
    workers = Workers(tmp_path / "gate")
    gate = workers(slots=1)

    def fail(self):
        raise OSError("no space left")

    monkeypatch.setattr(Folder, "join", fail)
    before = descriptors_before()
    with pytest.raises(OSError, match="no space left"):
        gate.try_admit()
    assert open_descriptors() == before
    monkeypatch.undo()
    gate.try_admit().release()
    workers.close()


def test_asks_on_when_its_leader_reads_again(workers) -> None:
    """What does not fit the connection waits, and nothing of it is lost."""
    a, b = workers.two(slots=1)
    member = b._member
    with stalled(a):
        with member.locked():
            while not member._link.flush():
                member._tell(wire.EXPIRE, 0, None)
            member._tell(wire.EXPIRE, 0, None)
    b.try_admit().release()
    wait_until(lambda: not member._link.flush())


def test_ignores_late_calls_and_unknown_words(workers) -> None:
    """Calls about a connection that is over change nothing, nor do frames to come."""
    a, b = workers.two(slots=1)
    link = b._member._link
    b._member.loop.call(b._member._seek_anew, 77)
    b._member.loop.call(b._member._read, object())
    leader = a._member.leader
    wait_until(lambda: leader._peers)
    (peer,) = leader._peers.values()
    a._member.loop.call(leader._put, peer, 99, 0)
    b.try_admit().release()
    assert b._member._link is link


def test_takes_the_newer_of_two_connections(raw) -> None:
    """A worker that greets twice has left its older connection."""
    gate, odd = raw()
    odd.hello()
    odd.hear()
    old = odd.link
    odd.connect(gate)
    odd.row.add(1, 0)
    odd.hello(held=[(7, 1, 0, None)])
    odd.hear()
    wait_until(lambda: not old.read() and old.ended)
    assert gate.statistics().slots_in_use == 1
    with pytest.raises(GateFull):
        gate.try_admit()
    odd.say(wire.RELEASE, 7)
    wait_until(lambda: granted(gate))


def test_ignores_what_it_does_not_know_of(raw) -> None:
    """Late words about a request that is over change nothing."""
    gate, odd = raw()
    odd.hello()
    odd.hear()
    for frame in (
        (wire.RELEASE, 9),
        (wire.CANCEL, 9),
        (wire.SETTLE, 9, 5),
        (wire.EXPIRE, 9, None),
    ):
        odd.say(*frame)
    odd.say(wire.CAPACITY, 0, 50, None)  # an old one
    odd.say(*ASK)
    assert odd.hear() == [[wire.GRANT, 1]]
    assert gate.statistics().slots == 1


def test_sends_the_rest_when_there_is_room(raw) -> None:
    """A worker that does not read holds nobody up, and gets all when it does."""
    gate, slow = raw()
    slow.hello()
    slow.hear()
    lease = gate.try_admit()
    for first in range(0, 20_000, 1000):
        for number in range(first, first + 1000):
            slow.link.put(wire.ASK, number, 0.0, 1, 0, None, 0, False)
        wait_until(lambda: not slow.link.flush())
    wait_until(lambda: gate._member.leader._blocked)
    refused = 0
    while refused < 20_000:
        refused += sum(kind == wire.REFUSE for kind, *_ in slow.hear())
    wait_until(lambda: not gate._member.leader._blocked)
    lease.release()
    gate.try_admit().release()


def test_waits_for_workers_before_it_grants(raw, workers, monkeypatch) -> None:
    """A new leader hears who lives first; what is cancelled meanwhile is forgotten."""
    monkeypatch.setattr(leader_module, "GRACE", 60.0)
    gate, first = raw()
    (_, second), (_, third) = raw(), raw()
    for each in (first, second, third):
        each.hello()
        each.hear()
    other = workers(slots=1)
    gate.close()
    other.statistics()
    wait_until(lambda: other._member.leader)
    assert not other._member.leader.open
    first.connect(other)
    first.hello(waiting=[(1, 2.0, 1, 0, None, 0, True), (2, 1.0, 1, 0, None, 0, True)])
    first.say(wire.ASK, 3, 0.0, 1, 0, None, 0, True)
    first.say(wire.CANCEL, 3)
    first.say(wire.ASK, 4, 3.0, 1, 0, None, 0, True)
    assert first.hear()[0][0] == wire.CAPACITY
    third.connect(other)
    third.hello(waiting=[(1, 0.5, 1, 0, None, 0, True)])
    assert third.hear()[0][0] == wire.CAPACITY
    third.link.close()
    wait_until(lambda: third.ident not in other._member.leader._peers)
    assert not other._member.leader.open
    second.connect(other)
    second.hello()
    assert first.hear() == [[wire.GRANT, 2]]


def test_buries_who_died_with_an_unlocked_row(raw, workers) -> None:
    """Counts of the dead go on, with what they held as released."""
    gate, odd = raw()
    odd.hello()
    odd.hear()
    odd.row.add(1, 0)
    odd.row.words[6] = 5  # admitted
    odd.row.words[9] = 3  # released
    odd.close()
    wait_until(lambda: gate.statistics().admitted == 6)
    assert gate.statistics().released == 6
    assert gate.statistics().slots_in_use == 0


def test_reads_a_capacity_that_is_being_written_as_none(raw, workers) -> None:
    """A row without a capacity, stopped half-way, says nothing to who comes."""
    gate, odd = raw()
    odd.row.words[CAPACITY_SINCE] = 0
    odd.row.words[SLOTS] = 0
    gate.close()
    other = workers(slots=1)
    other.try_admit().release()
    assert other.statistics().slots == 1


async def test_hands_a_grant_back_where_its_loop_is_closed(workers) -> None:
    """A request whose loop has ended gets nothing, and the next one does."""
    a, b = workers.two(slots=1)
    for gate in (a, b):
        lease = await a.admit()
        thread = threading.Thread(target=abandon, args=(gate,))
        thread.start()
        await until(partial(has_waiting, a))
        await until(lambda thread=thread: not thread.is_alive())
        lease.release()
        (await a.admit()).release()
    assert a.statistics().slots_in_use == 0


def has_waiting(gate):
    return gate.statistics().waiting


KEPT = []


def abandon(gate):
    """Close a loop under a request, which then never runs again."""
    import asyncio

    loop = asyncio.new_event_loop()
    request = gate.admit()
    KEPT.append(request)
    task = loop.create_task(request)
    KEPT.append(task)
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False
    loop.close()


def test_greets_anew_after_what_is_no_frame(workers, caplog) -> None:
    """A leader that says what is no frame loses the connection, and no worker."""
    a, b = workers.two(slots=1)
    for text in (b"7\n", b"[7]\n", b"[7,1,2,3,4]\n", b'[7,0,"No","",1]\n', b"\xff\n"):
        link = b._member._link
        wait_until(lambda: a._member.leader._peers)
        (peer,) = a._member.leader._peers.values()
        peer.connection.sock.send(text)
        wait_until(lambda link=link: b._member._link not in (None, link))
        b.try_admit().release()
        wait_until(lambda: not b._member._told)
    assert "is no frame of its leader" in caplog.text and not b._member.cut_off


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_refuses_while_another_version_leads(workers, monkeypatch, caplog) -> None:
    """Workers of two releases do not guess; the later one goes on when it can."""
    a = workers(slots=1)
    a.statistics()
    wait_until(lambda: leads(a))
    monkeypatch.setattr(member_module, "VERSION", 2)
    b = workers(slots=1)
    b.statistics()
    wait_until(lambda: b._member.cut_off)
    with pytest.raises(GateClosed, match="version 1 of its frames, not 2; restart all"):
        b.try_admit()
    assert caplog.text.count("restart all workers") == 1
    a.try_admit().release()
    a.close()
    wait_until(lambda: leads(b))
    b.try_admit().release()


@contextlib.contextmanager
def no_descriptors():
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_accepts_when_there_are_descriptors_again(raw, workers) -> None:
    """A leader without descriptors serves those it knows, spins not, and goes on."""
    gate, odd = raw()
    leader = gate._member.leader
    accepts = []
    accept = leader._accept

    def note():
        accepts.append(leader._beat_at)
        accept()

    with stalled(gate):
        gate._member.loop.unwatch(leader._listener)
        leader._accept = note
        leader._deaf = True
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    with no_descriptors():
        sock.connect(odd.folder.socket_path(gate._member.row.words[IDENT], 1))
        wait_until(lambda: len(accepts) >= 3)
        assert len(set(accepts[-3:])) == 3  # once a beat
        gate.try_admit().release()
        assert gate.statistics().slots_in_use == 0
    other = Connection(sock)
    odd.link, old = other, odd.link
    odd.links.append(other)
    odd.hello()
    assert odd.hear()[0][0] == wire.CAPACITY
    assert old is not other


@pytest.mark.thorough
def test_seeks_when_there_are_descriptors_again(workers, caplog) -> None:
    """A worker that can follow nobody and lead nobody does when it can."""
    a, b = workers.two(slots=1)
    with no_descriptors():
        cut(b)
        wait_until(lambda: "Too many open files" in caplog.text)
        first = b._member._seek_at
        wait_until(lambda: b._member._seek_at > first + 0.5)  # it has tried again
        assert caplog.text.count("Too many open files") == 1
        assert b.statistics().slots == 1
    wait_until(lambda: granted(b))
    with no_descriptors():
        a.close()
        a._member.loop._thread.join(60)
        wait_until(lambda: b._member._told)
    wait_until(lambda: leads(b))
    b.try_admit().release()


def test_drops_who_greets_where_no_row_can_be_opened(raw, monkeypatch) -> None:
    """A greeting for which there are no descriptors ends the connection alone."""
    gate, odd = raw()
    with monkeypatch.context() as patch:
        patch.setattr(gate._member.folder, "row", no_more)
        odd.hello()
        assert odd.hear() == [] and odd.link.ended
    odd.connect(gate)
    odd.hello()
    assert odd.hear()[0][0] == wire.CAPACITY


def no_more(*_):
    raise OSError(24, "Too many open files")


def test_leads_no_epoch_that_it_cannot_take_over(workers, monkeypatch) -> None:
    """An elected worker that can read no rows leaves the next epoch to another one."""
    a, b = workers.two(slots=1)
    c = workers(slots=1)
    c.statistics()
    wait_until(lambda: follows(c))
    monkeypatch.setattr(leader_module.Leader, "take_over", no_more)
    for each in (b, c):
        monkeypatch.setattr(each._member, "_retries", 0)
    a.close()
    wait_until(lambda: b._member._told or c._member._told)
    monkeypatch.undo()
    wait_until(lambda: leads(b) or leads(c))
    for each in (b, c):
        wait_until(lambda each=each: granted(each))


def test_joins_with_the_next_request_where_no_thread_starts(
    workers, monkeypatch
) -> None:
    """A worker without a thread is none: its row is unlocked, and it joins later."""
    gate = workers(slots=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            gate.try_admit()
    gate.try_admit().release()
    wait_until(lambda: len(list(workers.folder.glob("row.*"))) == 1)


def no_thread(self):
    raise RuntimeError("can't start new thread")


def test_keeps_no_row_locked_where_it_cannot_join(workers, monkeypatch) -> None:
    """A worker that gets no loop leaves no row behind that seems to live."""
    gate = workers(slots=1)
    with monkeypatch.context() as patch:
        patch.setattr(selectors, "DefaultSelector", no_more)
        assert gate.statistics().slots_in_use == 0
        with pytest.raises(OSError, match="Too many"):
            gate.try_admit()
    gate.try_admit().release()
    wait_until(lambda: len(list(workers.folder.glob("row.*"))) == 1)


def test_counts_on_for_the_dead_before_they_are_buried(raw) -> None:
    """No count falls when a worker dies: what it counted is read from its row."""
    gate, odd = raw()
    odd.row.add(1, 0)
    odd.row.words[ADMITTED] = 5
    assert gate.statistics().admitted == 6
    with stalled(gate):
        odd.row.close()
        now = gate.statistics()
        assert (now.admitted, now.released, now.slots_in_use) == (6, 6, 0)
