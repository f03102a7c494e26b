"""Placement: what a replica needs, and where in the cluster it may run."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from collections.abc import Mapping
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


def join_cluster(address: str | None, local: Mapping[str, Any]) -> bool:
    """Make this process a driver, unless it is one; blocks for seconds.

    Args:
        address: Address of a cluster; ``None`` starts a private one on this machine.
        local: Options of ``ray.init`` for that one.

    Returns:
        Whether it joined here; the caller then has to leave the cluster.

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
        return False
    if address is not None:
        _join(address)
    else:
        # Without an address, Ray would look for one in the environment and in the
        # files that earlier clusters left on this machine.
        ray.init(
            address="local",
            **{"include_dashboard": False, "log_to_driver": False, **local},
        )
    return True


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


def _join(address: str) -> None:
    """Join a running cluster, within a time limit."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def join() -> None:
        try:
            ray.init(address=address, log_to_driver=False)
        except BaseException as error:  # noqa: BLE001 - raised below
            ended.put(error)
        else:
            ended.put(None)

    # A head that accepts connections and never answers holds ray.init up for minutes.
    # It cannot be cancelled; a daemon thread does not keep the process from exiting.
    threading.Thread(target=join, name="ray.init", daemon=True).start()
    try:
        error = ended.get(timeout=_JOIN_SECONDS)
    except queue.Empty:
        raise _no_cluster(address, f"for {_JOIN_SECONDS:g} s") from None
    if error is not None:
        raise error


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
