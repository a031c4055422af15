"""Joins the hosts of a run and lays all their devices on the mesh axis RANK.

Rule: the only file that calls jax.distributed. On a TPU pod everything is found automatically;
elsewhere the coordinator, the number of hosts and this host's id come from the command line.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from k3serve.errors import ConfigError, HostFailure
from k3serve.model.collectives import RANK

log = logging.getLogger("k3serve")


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Which hosts run together. num_hosts None: ask the platform (TPU pods, Slurm, ...)."""

    coordinator: str | None = None  # host:port of process 0
    num_hosts: int | None = None
    host_id: int | None = None
    connect_timeout_s: int = 300


JAX_EXTRA_S = 30  # JAX ends the process by a core dump when its own time limit is over


def join(
    group: HostGroup,
    *,
    cpu_ranks: int | None = None,
    on_timeout: Callable[[HostFailure], None] = lambda failure: None,
) -> None:
    """Starts JAX for this host; must come before any other use of a device.

    cpu_ranks: how many virtual devices a CPU host shows, at least. When not all hosts arrive
    within connect_timeout_s this thread is blocked in JAX, so on_timeout is called in another one
    with a HostFailure that names the address: it should end the process.
    """
    if cpu_ranks is not None and _cpu_devices() < cpu_ranks:
        jax.config.update("jax_num_cpu_devices", cpu_ranks)
    if group.num_hosts == 1:
        return
    if group.num_hosts is None and not _on_pod():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # it would swallow SIGTERM until the leader has its own handler: a start could not be stopped
    jax.config.update("jax_enable_preemption_service", False)
    limit = threading.Timer(group.connect_timeout_s, lambda: on_timeout(_not_met(group)))
    limit.daemon = True
    limit.start()
    try:
        jax.distributed.initialize(
            coordinator_address=group.coordinator,
            num_processes=group.num_hosts,
            process_id=group.host_id,
            initialization_timeout=group.connect_timeout_s + JAX_EXTRA_S,
        )
    except Exception as error:
        raise _not_met(group, f" ({error})") from error
    finally:
        limit.cancel()


def _not_met(group: HostGroup, detail: str = "") -> HostFailure:
    who = "" if group.host_id is None else f"host {group.host_id}: "
    where = group.coordinator or "the address the platform gave"
    return HostFailure(
        f"{who}not all {group.num_hosts or 'expected'} hosts met at {where} "
        f"within {group.connect_timeout_s} s: check that every host was started with the same "
        f"--coordinator and --num-hosts and its own --host-id{detail}"
    )


def _on_pod() -> bool:
    """Whether JAX's own cluster detection (TPU pods, Slurm, ...) finds more than one process."""
    from jax._src.clusters import ClusterEnv

    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    found = next((kind for kind in kinds if kind.is_env_present()), None)
    if found is None:
        return False
    try:
        return found.get_process_count() > 1
    except Exception as error:  # a lone pod of Kubernetes, say
        log.warning(
            "%s: cannot tell how many hosts take part (%s); running alone. Use --coordinator, "
            "--num-hosts and --host-id where that is wrong", found.__name__, error,
        )  # fmt: skip
        return False


def _cpu_devices() -> int:
    return int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]


def make_mesh(ranks_per_host: int | None = None) -> Mesh:
    """The first ranks_per_host devices of every host (None: all), in process order."""
    by_host: dict[int, list[jax.Device]] = {}
    for device in sorted(jax.devices(), key=lambda d: (d.process_index, d.id)):
        by_host.setdefault(device.process_index, []).append(device)
    if ranks_per_host is not None:
        for host, devices in by_host.items():
            if ranks_per_host > len(devices):
                raise ConfigError(
                    f"--ranks {ranks_per_host}: host {host} has only {len(devices)} devices"
                )
    chosen = [d for devices in by_host.values() for d in devices[:ranks_per_host]]
    return Mesh(np.array(chosen), (RANK,))


def agree(settings: Mapping[str, str], timeout_s: float) -> None:
    """Compares what must be equal on all hosts; ConfigError, on each of them, names what is not.

    Without this, hosts that round or cut their work in other ways would disagree in silence.
    """
    if jax.process_count() == 1:
        return
    from jax._src.distributed import global_state

    client = global_state.client
    assert client is not None, "several processes, but jax.distributed is not up"
    try:
        client.key_value_set(f"k3serve/settings/{jax.process_index()}", json.dumps(dict(settings)))
        client.wait_at_barrier("k3serve-settings", int(timeout_s * 1000))
        told = client.key_value_dir_get("k3serve/settings/")
    except Exception as error:
        raise HostFailure(
            f"not all {jax.process_count()} hosts told their settings within {timeout_s:.0f} s "
            f"(--connect-timeout): look for an error in the others' logs ({error})"
        ) from error
    hosts = {int(key.rpartition("/")[2]): json.loads(value) for key, value in told}
    for host, theirs in sorted(hosts.items()):
        for name in sorted({*hosts[0], *theirs}):
            if theirs.get(name) != hosts[0].get(name):
                raise ConfigError(
                    f"{name} is {hosts[0].get(name)} on host 0, but {theirs.get(name)} on host "
                    f"{host}: all hosts must run the same version with the same settings"
                )


def wait_for_all_hosts(timeout_s: float) -> None:
    """Returns when every host of the run has come here; HostFailure names the wait otherwise."""
    if jax.process_count() == 1:
        return
    from jax._src.distributed import global_state

    assert global_state.client is not None, "several processes, but jax.distributed is not up"
    try:
        global_state.client.wait_at_barrier("k3serve-ready", int(timeout_s * 1000))
    except Exception as error:
        raise HostFailure(
            f"not all {jax.process_count()} hosts were ready within {timeout_s:.0f} s "
            f"(--connect-timeout): look for an error in the others' logs ({error})"
        ) from error
