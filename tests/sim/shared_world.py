"""Workers of a shared gate on a simulated host, and a random schedule for all of them.

Members and leaders are the real ones, with their rows, frames and files, and so is the
gate of who leads. Imitated are the thread of a member, its sockets, and what
`SharedGate` does with a member. Statements, the delivery of what is sent, time, stops,
kills and requests come in an order that a seed draws. Some laws are checked after each
step; others, such as that of wake-ups, at the end.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from shared_host import Host, Process, Thread
from shared_worker import (
    DONE,
    HELD,
    Capacity,
    Lease,
    Request,
    Worker,
    rows,
    statements,
)

SLOTS, BYTES = rows.SLOTS, rows.BYTES
# Virtual seconds, and steps, within which all is well once nothing goes wrong.
CALM_S, CALM_STEPS = 30.0, 100_000
# Statements within which a thread waits for something. Most take some hundreds.
MOST_STATEMENTS = 100_000


class Broken(AssertionError):
    """A law does not hold."""


class Crashed(Exception):
    """A thread has ended by an error: of the gate or of this simulation, who knows."""


class World:
    """One schedule.

    Args:
        seed: Draws all of it.
        folder: Where the folder of the gate is made, and removed at the end.
        steps: Until the faults end.
        keep: How much of the trail; ``None`` for all of it.

    Attributes:
        trail: What was done.
        steps: How many were made.
    """

    def __init__(
        self, seed: int, folder: str, *, steps: int = 600, keep: int | None = 60
    ) -> None:
        self.rng = rng = Random(seed)
        self.host = Host(statements, rng.choice((1, 2, 4, 1000, 1000)))
        self.path = tempfile.mkdtemp(dir=folder)
        self.trail: deque[tuple[Any, ...]] = deque(maxlen=keep)
        self.steps, self._most_steps = 0, steps
        self.order = rng.choice(("fifo", "fifo", "fair"))
        self.limits = self._draw_limits()
        self.bound = list(self.limits)
        self._resizes = rng.random() < 0.25
        self._interrupts = rng.choice((0.1, 0.5, 0.9))
        self._strikes = rng.choice((0.0, 0.02, 0.1, 0.4))
        self._times = rng.choice((0.05, 0.15, 0.4))
        self._epoch = 0
        self._ticks = 0
        self.workers: list[Worker] = []
        self._dying: list[Worker] = []
        for _ in range(rng.randint(2, 5)):
            self._start()

    def tick(self) -> int:
        """Return a time in nanoseconds that is later than the last one."""
        self._ticks += 1
        return int(self.host.now * 1e9) + self._ticks

    def run(self) -> int:
        """Run the schedule, and return after how many steps it had ended."""
        try:
            try:
                while self.steps < self._most_steps:
                    self._act()
                self._calm()
            except (Broken, Crashed) as error:
                error.add_note(
                    f"step {self.steps}; the last ones were:\n{self.story()}"
                )
                raise
        finally:
            self._clean()
        return self.steps

    def story(self) -> str:
        """Return the trail, a line each."""
        return "\n".join(" ".join(map(str, each)) for each in self.trail)

    def _clean(self) -> None:
        self.host.end([each for it in self.workers for each in it.process.threads])
        for each in self.workers:
            if each.member is not None:
                each.member.close()
        shutil.rmtree(self.path, ignore_errors=True)

    # Steps.

    def _draw_limits(self) -> tuple[int | None, int | None]:
        slots, nbytes = self.rng.randint(1, 4), self.rng.choice((None, 10, 20))
        return slots, nbytes

    def _start(self) -> None:
        process = Process(self.host, len(self.workers))
        worker = Worker(self, process)
        self.workers.append(worker)
        process.spawn(worker.run)
        self.trail.append(("start", process.number))

    @property
    def live(self) -> list[Worker]:
        """Workers that were not killed and have not left."""
        return [
            it
            for it in self.workers
            if not it.process.dead and (it.member is None or it.member.is_in)
        ]

    @property
    def _inside(self) -> list[Worker]:
        return [it for it in self.live if it.member is not None]

    def _may_go(self, worker: Worker) -> bool:
        """Whether another one stays."""
        return any(not it.closing for it in self.live if it is not worker)

    def _act(self) -> None:
        self.steps += 1
        drawn = self.rng.random()
        if drawn < 0.01:
            self._fault()
        elif drawn < 0.2:
            self._use()
        elif self.rng.random() < self._times or not self._go_on():
            self._pass_time()

    def _go_on(self) -> bool:
        """Let one thread run, or something come; ``False`` if there is none."""
        rng = self.rng
        threads = [it for each in self.live for it in each.process.threads if it.ready]
        chosen = [*threads, *self.host.moving, *self._dying]
        if not chosen:
            return False
        it = rng.choice(chosen)
        if isinstance(it, Worker):
            self._die(it)
        elif isinstance(it, Thread):
            self._run(it)
        else:
            frames, rest = rng.choice(((1, 0), (1, 2), (0, 1), (99, 0), (99, 0)))
            self.trail.append(("deliver", it.process.number, frames, rest))
            it.deliver(frames, rest)
        return True

    def _run(self, thread: Thread) -> None:
        rng, process = self.rng, thread.process
        most = MOST_STATEMENTS
        if rng.random() < self._interrupts:
            most = rng.choice((rng.randint(1, 8), int(rng.expovariate(1 / 40))))
        which = process.threads.index(thread)
        interrupted = self._step(thread, most)
        self.trail.append(("run", process.number, ("app", "loop")[which], most))
        if interrupted and rng.random() < self._strikes:
            worker = self.workers[process.number]
            if rng.random() < 0.25 and self._may_go(worker):
                self._kill(worker)
            else:
                self._stop(worker)

    def _step(self, thread: Thread, most: int = MOST_STATEMENTS) -> bool:
        """Let a thread run until it waits, or is interrupted: return whether it is."""
        interrupted = self.host.run(thread, most)
        self._check()
        if interrupted and most == MOST_STATEMENTS:
            raise Broken(f"a thread runs on and on: {self._state()}")
        return interrupted

    def _pass_time(self) -> None:
        now, live = self.host.now, self.live
        times = [it.process.continues_at for it in live]
        for each in live:
            if not each.process.stopped:
                times += [it.until for it in each.process.threads]
        until = min((it for it in times if it > now), default=now + 1.0)
        # A timer is late, and now and then all of them are.
        late = self.rng.choice((0.0, 0.0, 0.001, 0.02))
        self.host.now = (now if math.isinf(until) else until) + late
        for each in live:
            if each.process.continues_at <= self.host.now:
                self._continue(each)
        self.trail.append(("time", round(self.host.now - 1000, 4)))

    # Faults.

    def _fault(self) -> None:
        rng, live = self.rng, self.live
        drawn, worker = rng.random(), rng.choice(live)
        if drawn < 0.4:
            if not worker.process.stopped:
                self._stop(worker)
        elif drawn < 0.5:
            self._cut(worker)
        elif drawn < 0.7:
            if self._may_go(worker):
                self._kill(worker)
        elif drawn < 0.95:
            if len(live) < 5:
                self._start()
        elif self._may_go(worker) and worker.member is not None and not worker.closing:
            self._close(worker)

    def _close(self, worker: Worker) -> None:
        worker.closing = True
        self._job(worker, "close", worker.close)

    def _cut(self, worker: Worker) -> None:
        if worker.process.sockets:
            self.rng.choice([*worker.process.sockets]).cut()
            self.trail.append(("cut", worker.process.number))

    def _stop(self, worker: Worker) -> None:
        process, seconds = worker.process, self.rng.choice((0.02, 0.3, 0.8, 2.0))
        process.stopped, process.continues_at = True, self.host.now + seconds
        self.trail.append(("stop", process.number, seconds))

    def _continue(self, worker: Worker) -> None:
        worker.process.stopped, worker.process.continues_at = False, math.inf
        self.trail.append(("continue", worker.process.number))

    def _kill(self, worker: Worker) -> None:
        worker.process.kill()
        self.trail.append(("kill", worker.process.number))
        ends = self.rng.random()
        if ends < 0.5:
            worker.process.close_sockets()
        if 0.3 < ends < 0.7:
            worker.process.unlock_row()
        self._dying.append(worker)

    def _die(self, worker: Worker) -> None:
        self._dying.remove(worker)
        worker.process.close_sockets()
        worker.process.unlock_row()
        self.trail.append(("dead", worker.process.number))

    # The applications.

    def _job(self, worker: Worker, name: str, *call: Any) -> None:
        worker.jobs.append(partial(*call))
        self.trail.append((name, worker.process.number))

    def _use(self) -> None:
        """Let the application of one worker begin to do something."""
        rng, worker = self.rng, self.rng.choice(self.live)
        if worker.member is None:
            return
        leases = [
            (lease, request)
            for lease, request in worker.leases.values()
            if not lease.asked and lease.state != DONE
        ]
        if rng.random() < 0.4 or not leases:
            cost = rng.randint(0, 2), rng.randint(0, 8)
            args = *cost, rng.random() < 0.8, rng.randint(0, 1)
            self._job(worker, f"ask {args}", worker.ask, *args)
            return
        lease, request = rng.choice(leases)
        if lease.state == HELD:
            self._give_back(worker, lease)
        elif rng.random() < 0.3:
            if request.may_wait:
                lease.asked = lease.cancelled = True
                name = f"cancel {lease.number}"
                self._job(worker, name, worker.cancel, lease, request)
            else:
                name = f"give up {lease.number}"
                self._job(worker, name, worker.give_up, request)
        elif rng.random() < 0.1:
            name = f"expire {lease.number}"
            self._job(worker, name, worker.expire, lease, request)
        elif self._resizes and rng.random() < 0.2:
            self._resize(worker)

    def _give_back(self, worker: Worker, lease: Lease) -> None:
        if self.rng.random() < 0.2:
            nbytes = self.rng.randint(0, lease.uses[1])
            name = f"settle {lease.number} {nbytes}"
            self._job(worker, name, worker.settle, lease, nbytes)
        else:
            lease.asked = True
            name = f"release {lease.number}"
            self._job(worker, name, worker.release, lease)

    def _resize(self, worker: Worker) -> None:
        self.limits = self._draw_limits()
        for i, limit in enumerate(self.limits):
            known = self.bound[i]
            self.bound[i] = None if None in (limit, known) else max(limit, known)
        capacity = Capacity(self.tick(), *self.limits)
        self._job(worker, f"resize {self.limits}", worker.resize, capacity)

    # The end.

    def _calm(self) -> None:
        """Continue all, let nothing more go wrong, and see what becomes of it."""
        self.trail.append(("calm",))
        for each in [*self._dying]:
            self._die(each)
        for each in self.live:
            self._continue(each)
        while len([each for each in self.live if not each.closing]) < 2:
            self._start()
        self._let_be(self._all_joined, "not all workers have joined")
        # What a worker named that leaves may be lost with it.
        stay = [each for each in self.live if not each.closing]
        newest = max((each.member.capacity for each in stay), default=None)
        for each in self.live:
            self._job(each, "last ask", each.ask, 1, 1, True, 0)
        self._let_be(self._none_waits, "a request waits for ever")
        self._let_be(self._all_stay, "who was closed has not left")
        self._let_be(self._books_are_zero, "books are not zero after all releases")
        self._let_be(lambda: self._agree(newest), f"not all know of {newest}")
        self._expire_a_request()
        self._stop_the_leader()
        self._stop_as_it_takes_a_grant()
        self._let_be(self._files_are_in_use, "files are left")
        self.trail.append(("files", *self._files()))
        self._check_counts()
        for each in self.live:
            self._close(each)
        self._let_be(self._all_left, "not all workers have left")

    def _ask_for_all(self, worker: Worker) -> Lease:
        """Let the application ask for all slots, and its thread of the gate not run."""
        slots = worker.member.capacity.slots
        return self._ask_now(worker, slots)[0]

    def _ask_now(self, worker: Worker, slots: int) -> tuple[Lease, Request]:
        self._job(worker, f"ask now {slots}", worker.ask, slots, 0, True, 0)
        self._step(worker.process.threads[0])
        if worker.jobs:
            raise Broken(f"an application cannot ask: {self._state()}")
        return worker.leases[worker.numbers]

    def _expire_a_request(self) -> None:
        """See that a request is refused in time, while another one holds all."""
        holder, worker = self.rng.sample(self.live, 2)
        held = self._ask_for_all(holder)
        held.asked = True  # here, and not as soon as it can be
        self._let_be(lambda: held.state == HELD, "a request waits for nothing")
        lease, request = self._ask_now(worker, 1)
        self._job(worker, f"expire {lease.number}", worker.expire, lease, request)
        self._let_be(lambda: lease.state == DONE, "a request that has expired waits")
        self._job(holder, f"release {held.number}", holder.release, held)
        self._let_be(self._books_are_zero, "books are not zero after a refusal")

    def _stop_the_leader(self) -> None:
        """See that the others go on without it, for however long it is stopped."""
        leaders = [it for it in self.live if it.member.leader is not None]
        others = [it for it in self.live if it not in leaders]
        for each in leaders:
            each.process.stopped = True
            self.trail.append(("stop", each.process.number))
        for each in others:
            self._job(each, "ask beside", each.ask, 1, 1, True, 0)
        self._let_be(self._none_waits, "a request waits for a leader that is stopped")
        for each in leaders:
            self._continue(each)
        self._let_be(self._none_waits, "a request waits for ever after a stop")
        self._let_be(self._books_are_zero, "books are not zero after a stop")

    def _stop_as_it_takes_a_grant(self) -> None:
        """See who has what a worker was granted that is stopped meanwhile."""
        worker = self.rng.choice([it for it in self.live if it.member.leader is None])
        leader = next(it for it in self.live if it.member.leader is not None)
        other = self.rng.choice([it for it in self.live if it is not worker])
        self._ask_for_all(worker)
        worker.process.stopped = True
        self.trail.append(("stop", worker.process.number))
        granted = partial(self._uses_slots, leader)
        self._let_be(granted, "a request is not granted")
        # Stopped before it takes the grant, or in the middle of that.
        most = self.rng.choice((0, self.rng.randint(1, 40)))
        if most:
            self.host.run(worker.process.threads[1], most)
            self._check()
            self.trail.append(("run", worker.process.number, "loop", most))
        held = self._ask_for_all(other)
        held.asked = True
        self._let_be(
            lambda: held.state == HELD or worker.member.row.words[SLOTS],
            "a request waits for what nobody has taken",
        )
        self._continue(worker)
        self._let_be(lambda: held.state == HELD, "a request waits that was first")
        for _ in range(5):
            self._act_calmly()
        self._job(other, f"release {held.number}", other.release, held)
        self._let_be(self._none_waits, "a request waits that was granted once")
        self._let_be(self._books_are_zero, "books are not zero after a second stop")

    def _uses_slots(self, leader: Worker) -> bool:
        return leader.gate.statistics().slots_in_use > 0

    def _let_be(self, done: Callable[[], bool], problem: str) -> None:
        until, steps = self.host.now + CALM_S, self.steps + CALM_STEPS
        while not done():
            if self.host.now > until or self.steps > steps:
                raise Broken(f"{problem}: {self._state()}")
            self._act_calmly()

    def _act_calmly(self) -> None:
        self.steps += 1
        for each in self.live:
            for thread in each.process.threads:
                if thread.ready:
                    self._step(thread)
        for sock in list(self.host.moving):
            sock.deliver(1_000, 0)
        for each in self.live:
            for lease, _ in list(each.leases.values()):
                if lease.state == HELD and not lease.asked:
                    lease.asked = True
                    self._job(each, f"release {lease.number}", each.release, lease)
        if not self.host.moving and not any(
            it.ready for each in self.live for it in each.process.threads
        ):
            self._pass_time()

    def _all_joined(self) -> bool:
        return all(it.member is not None and not it.jobs for it in self.live)

    def _none_waits(self) -> bool:
        return all(
            not each.jobs
            and all(lease.state == DONE for lease, _ in each.leases.values())
            for each in self.live
            if not each.process.stopped
        )

    def _all_stay(self) -> bool:
        return not any(each.closing for each in self.live)

    def _books_are_zero(self) -> bool:
        inside = self._inside
        if any(
            it.member.row.words[SLOTS] or it.member.row.words[BYTES] for it in inside
        ):
            return False
        leaders = [it for it in inside if it.member.leader is not None]
        if not leaders:
            return not inside
        if len(leaders) > 1 or not leaders[0].member.leader.open:
            return False
        epoch = leaders[0].member.epoch
        if not all(it.member.epoch == epoch and it.member._greeted for it in inside):
            return False
        now = leaders[0].gate.statistics()
        return not (now.slots_in_use or now.bytes_in_use or now.waiting)

    def _agree(self, newest: Capacity | None) -> bool:
        known = {each.member.capacity for each in self._inside if not each.closing}
        return newest is None or (len(known) == 1 and min(known) >= newest)

    def _all_left(self) -> bool:
        return not self._inside

    def _files_are_in_use(self) -> bool:
        """Whether there are the rows of live workers, one link, and one socket."""
        used = set()
        for each in self.live:
            member = each.member
            ident = member.row.words[rows.IDENT]
            used.add(f"row.{ident:x}")
            if member.leader is not None:
                used |= {f"leader.{member.epoch}", f"sock.{ident:x}.{member.epoch}"}
        return sorted(used) == self._files()

    def _files(self) -> list[str]:
        return sorted(each.name for each in Path(self.path).iterdir())

    def _check_counts(self) -> None:
        for each in self.workers:
            if each.process.dead:
                continue
            for lease, _ in each.leases.values():
                if lease.woken != (not lease.known):
                    who = f"request {lease.number} of worker {each.process.number}"
                    raise Broken(f"{who} was woken {lease.woken} times")
        if self._inside:
            totals = self._inside[0].member.folder.totals()
            admitted, released = totals[rows.ADMITTED], totals[rows.RELEASED]
            if admitted != released:
                raise Broken(f"{admitted} were admitted, and {released} released")

    # Laws.

    def _check(self) -> None:
        if self.host.crashes:
            raise Crashed(self.host.crashes[0])
        slots = nbytes = 0
        for each in self.live:
            if each.member is None:
                continue
            uses, words = each.uses, each.member.row.words
            if uses[0] > words[SLOTS] or uses[1] > words[BYTES]:
                raise Broken(
                    f"worker {each.process.number} uses more than its row says"
                )
            slots, nbytes = slots + uses[0], nbytes + uses[1]
        for used, most in zip((slots, nbytes), self.bound, strict=True):
            if most is not None and used > most:
                raise Broken(f"over-admitted: {used} of {most}; {self._state()}")
        self._check_books(slots, nbytes)

    def _check_books(self, slots: int, nbytes: int) -> None:
        """See that who leads in the newest epoch knows of all that is held."""
        leaders = [
            (each.member.leader, each)
            for each in self.live
            if each.member is not None and each.member.leader is not None
        ]
        self._epoch = max([self._epoch, *(leader.epoch for leader, _ in leaders)])
        for leader, each in leaders:
            if leader.epoch < self._epoch or not leader.open:
                continue
            now = each.gate.statistics()
            if now.slots_in_use < slots or now.bytes_in_use < nbytes:
                raise Broken(
                    f"the leader {each.process.number} knows of {now.slots_in_use}, "
                    f"{now.bytes_in_use} in use, not of {slots}, {nbytes}; "
                    f"{self._state()}"
                )

    def _state(self) -> str:
        lines = [f"limits {self.bound}, time {self.host.now - 1000:.3f}"]
        for each in self.live:
            member = each.member
            if member is None:
                lines.append(f"worker {each.process.number} has not joined")
                continue
            asked = [
                (lease.number, lease.state, lease.uses, lease.asked)
                for lease, _ in each.leases.values()
                if lease.state != DONE
            ]
            leads = member.leader is not None and member.leader.open
            lines.append(
                f"worker {each.process.number} of epoch {member.epoch}, "
                f"{'leads' if leads else 'follows'}, row "
                f"{member.row.words[SLOTS]}, {member.row.words[BYTES]}: {asked}"
            )
        lines.append(f"files: {self._files()}")
        return "\n".join(lines)
