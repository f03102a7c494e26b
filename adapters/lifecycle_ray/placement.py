"""Placement: what a replica needs, and where in the cluster it may run."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_CONNECT_SECONDS = 5.0
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resources that Ray reserves for each replica.

    Attributes:
        num_cpus: CPUs.
        num_gpus: GPUs; the actor sees only these in ``CUDA_VISIBLE_DEVICES``.
        resources: Custom resources of the cluster, by name.
        placement_group: A ``ray.util.placement_group``; replica *n* runs in its bundle
            *n* modulo their number. ``None`` is anywhere.
        runtime_env: As for ``ray.remote``: environment variables, packages.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement_group: Any = None
    runtime_env: Mapping[str, Any] | None = None

    def options(self, replica: int) -> dict[str, Any]:
        """Return the actor options of a replica."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
        }
        if self.runtime_env is not None:
            options["runtime_env"] = dict(self.runtime_env)
        group = self.placement_group
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=replica % group.bundle_count
            )
        return options


def join_cluster(
    address: str | None, local: Mapping[str, Any]
) -> Callable[[], None] | None:
    """Make this process a driver, unless it is one; blocks for seconds.

    Args:
        address: Address of a cluster; ``None`` starts a private one on this machine.
        local: Options of ``ray.init`` for that one.

    Returns:
        Leaves the cluster, and blocks for seconds; ``None`` if this process had joined
        one before.

    Raises:
        ConnectionError: Nothing answers at that address.
        ValueError: It is the address of a Ray client server, or *local* has one.
    """
    if address is not None and address.startswith("ray://"):
        raise ValueError(f"{address} is for clients; run this on a node of the cluster")
    if "address" in local:
        raise ValueError(
            f"local has the address {local['address']!r}; pass it as address=, and "
            f"nothing to start a private cluster"
        )
    if address is not None:
        _check_address(address)
    if ray.is_initialized():
        return None
    if address is None:
        # Without an address, Ray would look for one in the environment and in the
        # files that earlier clusters left on this machine.
        return _init_ray(
            {"address": "local", "include_dashboard": False, "log_to_driver": False}
            | dict(local)
        )
    try:
        # A head that accepts connections and never answers holds it up for minutes.
        return _init_ray({"address": address, "log_to_driver": False}, _JOIN_SECONDS)
    except queue.Empty:
        raise _no_cluster(address, f"for {_JOIN_SECONDS:g} s") from None


def _check_address(address: str) -> None:
    """Check at once that something listens; ``ray.init`` takes minutes to fail."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):  # "auto", or "local"
        return
    try:
        socket.create_connection(
            (host.strip("[]"), int(port)), _CONNECT_SECONDS
        ).close()
    except OSError as error:
        raise _no_cluster(address, type(error).__name__) from None


def _init_ray(
    options: Mapping[str, Any], timeout: float | None = None
) -> Callable[[], None]:
    """Call ``ray.init`` in a thread that stays until the returned function has left.

    Linux kills the processes of a private cluster as soon as the *thread* that started
    them ends, and a worker thread of a pool ends when it was idle for a while. Being a
    daemon, this one does not keep the process from exiting.

    Raises:
        queue.Empty: It takes longer than *timeout* seconds; the thread goes on.
    """
    joined: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    left = threading.Event()

    def stay() -> None:
        try:
            ray.init(**options)
        except BaseException as error:  # noqa: ASYNC103, BLE001 - raised below
            joined.put(error)
        else:
            joined.put(None)
            left.wait()

    def leave() -> None:
        try:
            ray.shutdown()
        finally:
            left.set()
            thread.join()

    thread = threading.Thread(target=stay, name="ray.init", daemon=True)
    thread.start()
    error = joined.get(timeout=timeout)
    if error is not None:
        raise error
    return leave


def _no_cluster(address: str, reason: str) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address} ({reason}); name another address, or "
        f"start one there with: ray start --head"
    )


def restore_sigterm() -> None:
    """Restore the SIGTERM handler that Ray has replaced.

    Ray's handler ends the process with a crash report. Only the main thread can
    restore it; elsewhere nothing changes.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
