"""Mistakes that somebody could make in the core, each as a patch of its source.

A patch is a file and pairs of text, each of which must occur exactly once: where
the core has moved on, the mutant says so instead of passing for caught.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted mistake.

    Attributes:
        name: What goes wrong, in words that fit a test id.
        file: Module of the core.
        patches: Texts and what stands there instead.
    """

    name: str
    file: str
    patches: tuple[tuple[str, str], ...]

    def apply(self, source: str) -> str:
        """Return *source* with the mistake in it."""
        for old, new in self.patches:
            found = source.count(old)
            assert found == 1, (
                f"{self.name}: {found} places in {self.file} read {old!r}; "
                f"write the mutant anew"
            )
            source = source.replace(old, new)
        return source


def _mutant(name: str, file: str, *texts: str) -> Mutant:
    pairs = tuple(zip(texts[::2], texts[1::2], strict=True))
    return Mutant(name, file, pairs)


MUTANTS = (
    # The books of a gate.
    _mutant(
        "released-twice",
        "_ledger.py",
        "            return False\n        ticket.state = DONE\n        slots, nbytes",
        "            return False\n        slots, nbytes",
    ),
    _mutant(
        "release-wakes-nobody",
        "_ledger.py",
        "        if self.waiting:\n            self.pump()",
        "        pass",
    ),
    _mutant(
        "leaving-head-wakes-nobody",
        "_ledger.py",
        "kept smaller ones out.\n        self.pump()",
        "kept smaller ones out.",
    ),
    _mutant(
        "leaver-still-counts-as-waiting",
        "_ledger.py",
        "        ticket.state = DONE\n        self.waiting -= 1\n        self.withdrawn += 1\n        self.line",
        "        ticket.state = DONE\n        self.withdrawn += 1\n        self.line",
    ),
    _mutant(
        "leaver-stays-in-line",
        "_ledger.py",
        "        ticket.state = DONE\n        self.waiting -= 1\n        self.withdrawn += 1\n        self.line",
        "        self.waiting -= 1\n        self.withdrawn += 1\n        self.line",
    ),
    _mutant(
        "settling-wakes-nobody",
        "_ledger.py",
        "        ticket.cost = cost\n        self.pump()",
        "        ticket.cost = cost",
    ),
    _mutant(
        "settled-cost-is-forgotten", "_ledger.py", "        ticket.cost = cost\n", ""
    ),
    _mutant(
        "resizing-wakes-nobody",
        "_ledger.py",
        "        self.pump()\n        return misfits",
        "        return misfits",
    ),
    _mutant(
        "misfits-wait-for-ever",
        "_ledger.py",
        "[t for t in self.line if self.too_large(t.cost)]",
        "[]",
    ),
    _mutant(
        "skipped-waiter-is-uncounted",
        "_ledger.py",
        "                ticket.state = DONE\n                self.withdrawn += 1",
        "                ticket.state = DONE",
    ),
    _mutant(
        "granted-waiter-still-waits",
        "_ledger.py",
        "            self.waiting -= 1\n            if ticket",
        "            if ticket",
    ),
    _mutant(
        "last-place-stays-free",
        "_ledger.py",
        "self.slots_in_use + slots > self.slots)",
        "self.slots_in_use + slots >= self.slots)",
    ),
    _mutant(
        "bytes-are-not-checked",
        "_ledger.py",
        "            or (nbytes and self.bytes_in_use + nbytes > self.nbytes)\n        )\n\n    def too",
        "        )\n\n    def too",
    ),
    _mutant(
        "newcomer-overtakes-the-granted",
        "_ledger.py",
        "        self.unresumed += 1\n        self.pump()",
        "        self.pump()",
    ),
    _mutant(
        "resumed-are-still-awaited",
        "_ledger.py",
        "            self.unresumed -= 1",
        "            pass",
    ),
    _mutant(
        "too-large-waits-for-ever",
        "_ledger.py",
        "return 0 < self.slots < slots or 0 < self.nbytes < nbytes",
        "return False",
    ),
    _mutant(
        "grant-is-uncounted",
        "_ledger.py",
        "        self.granted += 1\n        ticket.state = HELD",
        "        ticket.state = HELD",
    ),
    _mutant(
        "sent-away-but-still-counted",
        "_ledger.py",
        "        self.waiting -= len(tickets)\n",
        "",
    ),
    _mutant(
        "sent-away-but-granted-later",
        "_ledger.py",
        "        for ticket in tickets:\n            ticket.state = DONE\n",
        "",
    ),
    # The line.
    _mutant(
        "last-comes-first", "_line.py", "return lane.popleft()", "return lane.pop()"
    ),
    _mutant(
        "low-priority-passes-a-large-head",
        "_line.py",
        "                        return None\n                    self",
        "                        break\n                    self",
    ),
    _mutant(
        "second-in-line-overtakes",
        "_line.py",
        "                    if not fits(head.cost):\n",
        "                    if not fits(head.cost):\n                        lane.rotate(-1)\n                        head = lane[0]\n                    if not fits(head.cost):\n",
    ),
    _mutant("low-priority-goes-first", "_line.py", "reverse=True", "reverse=False"),
    _mutant(
        "fair-order-forgets-grants", "_fair.py", "        flow.served += charged\n", ""
    ),
    # Admission.
    _mutant(
        "direct-grant-is-not-held",
        "_admission.py",
        "                lease.state = HELD\n",
        "",
    ),
    _mutant(
        "direct-grant-passes-the-line",
        "_admission.py",
        "                or (self.unresumed if wait else self.waiting)\n",
        "",
    ),
    _mutant(
        "closed-gate-admits",
        "_admission.py",
        "                self.closed\n                or",
        "                False\n                or",
        "not self.closed and straight_in",
        "straight_in",
    ),
    _mutant(
        "line-is-one-too-long",
        "_admission.py",
        "self.waiting >= most",
        "self.waiting > most",
    ),
    _mutant(
        "waits-for-itself", "_admission.py", "raise self.refusals.itself()", "pass"
    ),
    _mutant(
        "grant-dies-with-the-cancelled",
        "_admission.py",
        "            self._give_back(lease)\n        elif",
        "        elif",
    ),
    _mutant(
        "cancelled-waiter-stays-in-line",
        "_admission.py",
        "        else:\n            self.withdraw(lease)\n",
        "        else:\n",
    ),
    _mutant(
        "cancelled-waiter-is-still-awaited",
        "_admission.py",
        "        self.resume(lease)\n        if lease.state == HELD:",
        "        if lease.state == HELD:",
    ),
    _mutant(
        "timed-out-waiter-stays-in-line",
        "_admission.py",
        "                self.withdraw(lease)\n                self.timeouts",
        "                self.timeouts",
    ),
    _mutant(
        "timeout-is-no-refusal",
        "_admission.py",
        "                self.timeouts += 1\n                self.refused += 1",
        "                self.timeouts += 1",
    ),
    _mutant(
        "grant-loses-to-the-deadline",
        "_admission.py",
        "            refusal, lease.refusal = lease.refusal, None\n",
        "            refusal, lease.refusal = lease.refusal, None\n            if max_wait is not None:\n                refusal = self.refusals.timeout(max_wait)\n",
    ),
    _mutant(
        "sent-away-but-never-told",
        "_admission.py",
        "        ticket.granted()  # wakes it",
        "        # wakes it",
    ),
    _mutant(
        "refusal-is-lost", "_admission.py", "        ticket.refusal = refusal\n", ""
    ),
    _mutant(
        "lost-lease-stays-lost", "_lease.py", "            self._books.lose(self)\n", ""
    ),
    _mutant(
        "mail-is-left-lying",
        "_admission.py",
        "            self.release(lease)\n        finally:\n            lock.release()\n            if self._mail:\n                self._drain()",
        "            self.release(lease)\n        finally:\n            lock.release()",
    ),
    # Supervised starts.
    _mutant(
        "ended-before-it-is-closed",
        "_start.py",
        "                await self.closed.wait()",
        "                pass",
    ),
    _mutant(
        "started-though-it-is-over",
        "_start.py",
        "if self.closed.is_set() or open_ is None:",
        "if open_ is None:",
    ),
    _mutant(
        "lease-outlives-the-hand-off",
        "_start.py",
        "        if lease is not None:\n            lease.release()\n        if not self.init_done",
        "        if not self.init_done",
    ),
    _mutant(
        "barrier-stays-up-after-a-failure",
        "_start.py",
        '            del open_\n            self._settle("unknown")',
        "            del open_\n            if self.how == 'started':\n                self._settle(\"unknown\")",
    ),
    _mutant(
        "failed-start-is-ended",
        "_start.py",
        'in ("failed", "withheld")',
        'in ("withheld",)',
    ),
    _mutant(
        "withheld-start-is-ended",
        "_start.py",
        'in ("failed", "withheld")',
        'in ("failed",)',
    ),
    _mutant(
        "unknown-start-is-not-ended",
        "_start.py",
        'in ("failed", "withheld")',
        'in ("failed", "withheld", "unknown")',
    ),
    _mutant(
        "ended-twice",
        "_start.py",
        "        return await self._finish(end_timeout)",
        "        end, value = self._end, self.value\n        await self._finish(end_timeout)\n        self._end, self.value = end, value\n        return await self._finish(end_timeout)",
    ),
    _mutant("ends-something-else", "_start.py", "await end(value)", "await end(None)"),
    _mutant(
        "end-may-take-for-ever",
        "_start.py",
        "deadline = anyio.current_time() + end_timeout",
        "deadline = float('inf')",
    ),
    _mutant(
        "start-may-take-for-ever",
        "_start.py",
        "deadline = anyio.current_time() + self._timeout",
        "deadline = float('inf')",
    ),
    _mutant(
        "failed-end-kills-the-registry",
        "_start.py",
        "            except Exception as error:\n                forget_frames(error)\n                return error",
        "            except KeyError as error:\n                return error",
    ),
    _mutant(
        "error-keeps-the-payload",
        "_start.py",
        "        except Exception as error:\n            forget_frames(error)\n            self.error",
        "        except Exception as error:\n            self.error",
    ),
    _mutant(
        "shutdown-waits-for-the-start",
        "_start.py",
        "        if cut and self._opening is not None:",
        "        if False:",
    ),
    # Sessions.
    _mutant(
        "closed-session-keeps-its-boxes",
        "_session.py",
        "        for payload in boxes:\n            payload.clear()\n",
        "",
    ),
    _mutant(
        "last-outcome-decides",
        "_session.py",
        "        if self.outcome is not None:\n            return False\n        self.outcome = outcome",
        "        self.outcome = outcome",
    ),
    _mutant(
        "close-does-not-end-the-start",
        "_session.py",
        '            self._start.close(cut=outcome == "shutdown")',
        "            pass",
    ),
    _mutant(
        "unstarted-session-is-never-quiet",
        "_session.py",
        "        if self._start is None:\n            self._quiet.set()\n        else:",
        "        if self._start is not None:",
    ),
    _mutant(
        "stream-of-a-session-that-is-over",
        "_session.py",
        "            raise self._ended()\n        return start.result()",
        "            pass\n        return start.result()",
    ),
    _mutant(
        "refused-start-keeps-its-lease",
        "_session.py",
        "            start.abort()\n            raise",
        "            raise",
    ),
    _mutant(
        "stop-does-not-reach-the-owner",
        "_session.py",
        "            if self._scope is not None:\n                self._scope.cancel()\n",
        "",
    ),
    _mutant(
        "client-that-left-counts-as-cancelled",
        "_session.py",
        "return cancelled_as if cancelled else",
        'return "cancelled" if cancelled else',
    ),
    _mutant(
        "lost-engine-counts-as-failure",
        "_session.py",
        '        case EngineLost():\n            return "engine_lost"\n',
        "",
    ),
    _mutant(
        "id-in-use-is-overwritten",
        "_sessions.py",
        "        if id_ in self._live:",
        "        if False:",
    ),
    _mutant(
        "outcome-is-uncounted",
        "_sessions.py",
        "        self._outcomes[session.outcome] += 1\n",
        "",
    ),
    _mutant(
        "quiet-session-is-still-closing",
        "_sessions.py",
        "        self._closing.discard(session)\n",
        "",
    ),
    _mutant(
        "opens-while-draining",
        "_sessions.py",
        "        began = self._clock()\n        self._draining = True\n",
        "        began = self._clock()\n",
    ),
    _mutant(
        "drain-ends-nobody",
        "_sessions.py",
        'cut = self.close_all("shutdown")\n        # Every',
        "cut = 0\n        # Every",
    ),
    _mutant(
        "failed-end-is-uncounted",
        "_sessions.py",
        "            self._ends_failed += 1\n",
        "",
    ),
    # Streams and payloads.
    _mutant(
        "watchdog-sleeps-on",
        "_watchdog.py",
        "            self._earlier.set()",
        "            pass",
    ),
    _mutant(
        "idle-stream-is-left-alone",
        "_watchdog.py",
        '            stream.expire("idle" if stream.items else "first_item", waiting)\n',
        "",
    ),
    _mutant(
        "source-is-never-closed",
        "_stream.py",
        "                    await close()",
        "                    pass",
    ),
    _mutant("items-are-uncounted", "_stream.py", "        self.items += 1\n", ""),
    _mutant(
        "failed-stream-never-ends",
        "_stream.py",
        "            # The end, an error or a cancellation: the source is finished.\n            self._finish(error)\n",
        "",
    ),
    _mutant(
        "taken-payload-stays",
        "_payload.py",
        "value, self._value = self._value, _GONE",
        "value = self._value",
    ),
    _mutant(
        "payload-released-twice",
        "_payload.py",
        "            on_release, self._on_release = self._on_release, None\n",
        "            on_release = self._on_release\n",
        "        if value is not _GONE:\n            on",
        "        if True:\n            on",
    ),
    # Decorated functions.
    _mutant(
        "argument-is-not-boxed",
        "_scrub.py",
        "            boxes.append(payload)\n            return payload",
        "            boxes.append(payload)\n            return value",
    ),
    _mutant(
        "managed-lease-is-never-released",
        "_decorators.py",
        "            lease.release()\n        boxes",
        "            pass\n        boxes",
    ),
    _mutant(
        "managed-boxes-stay-full",
        "_decorators.py",
        "        for payload in boxes:\n            payload.clear()\n",
        "",
    ),
    _mutant(
        "managed-session-stays-open",
        "_decorators.py",
        "            session.close(outcome_of(end, session.cancelled_as))",
        "            pass",
    ),
    _mutant(
        "managed-start-loses-its-lease",
        "_decorators.py",
        "(session is None or not session.holds(lease))",
        "True",
    ),
)
