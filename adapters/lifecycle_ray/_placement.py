"""What a replica takes and where it may run; and the cluster that has it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_KNOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What Ray shall reserve for each replica.

    Attributes:
        num_cpus: Processors.
        num_gpus: GPUs; the actor sees these alone in ``CUDA_VISIBLE_DEVICES``.
        resources: Further resources of the cluster, by name.
        placement_group: A ``ray.util.placement_group``; replica *n* runs in its bundle
            *n*, and again from the first one after the last. ``None``: anywhere.
        runtime_env: As for ``ray.remote``: environment variables, packages.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement_group: Any = None
    runtime_env: Mapping[str, Any] | None = None

    def options(self, replica: int) -> dict[str, Any]:
        """Return the options of the actor of a replica."""
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
    """Make this process a driver, if it is none yet; blocks for seconds.

    Args:
        address: Of a cluster; ``None`` starts one on this machine.
        local: Options of ``ray.init`` for that one.

    Returns:
        Whether it was done here, and so is to be undone here.

    Raises:
        ConnectionError: Nobody listens at that address.
        ValueError: That address is of a Ray client's server.
    """
    if address is not None and address.startswith("ray://"):
        raise ValueError(f"{address} is for clients; run this on a node of the cluster")
    if address is not None:
        _knock(address)
    if ray.is_initialized():
        return False
    if address is not None:
        ray.init(address=address, log_to_driver=False)
    else:
        ray.init(**{"include_dashboard": False, "log_to_driver": False, **local})
    return True


def _knock(address: str) -> None:
    """Find out at once that nobody is there, which ``ray.init`` takes minutes for."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):  # "auto", or "local"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({type(error).__name__}); name "
            f"another address, or start one there with: ray start --head"
        ) from None


def take_back_sigterm() -> None:
    """Let SIGTERM do again what it did before Ray was joined.

    Ray lets it end the process with a crash report. Only the main thread can undo
    that; elsewhere nothing changes.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
