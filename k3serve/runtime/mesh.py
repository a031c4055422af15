"""Joins the hosts of a run and lays all their devices on the mesh axis RANK.

Rule: the only file that calls jax.distributed. On a TPU pod everything is found automatically;
elsewhere the coordinator, the number of hosts and this host's id come from the command line.
No wait for another host is without a limit: one that is stopped or cut off answers nothing, and
JAX's own calls have limits of minutes, or none.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from k3serve.errors import ConfigError, HostFailure
from k3serve.model.collectives import RANK

log = logging.getLogger("k3serve")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Which hosts run together. num_hosts None: ask the platform (TPU pods, Slurm, ...)."""

    coordinator: str | None = None  # host:port of process 0
    num_hosts: int | None = None
    host_id: int | None = None
    connect_timeout_s: int = 300


POLL_S = 0.1
LATE_S = 1.0  # for a wait that can name the missing host to do so, before it is cut short
TELL_S = 2.0
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
        jax.devices()  # here, under the limit: the first look waits for all hosts' devices
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
    told = _exchange("settings", json.dumps(dict(settings)), timeout_s)
    hosts = {host: json.loads(text) for host, text in told.items()}
    for host, theirs in sorted(hosts.items()):
        for name in sorted({*hosts[0], *theirs}):
            if theirs.get(name) != hosts[0].get(name):
                raise ConfigError(
                    f"{name} is {hosts[0].get(name)} on host 0, but {theirs.get(name)} on host "
                    f"{host}: all hosts must run the same version with the same settings and the "
                    "same checkpoint"
                )


def own_cache_folder(folder: str) -> str:
    """Where this host keeps its compiled programs: hosts may share a file system, and JAX's cache
    does not expect two writers of one file.
    """
    if jax.process_count() == 1:
        return folder
    return f"{folder}/host{jax.process_index()}of{jax.process_count()}"


@contextmanager
def keeping_programs() -> Iterator[None]:
    """Meanwhile, this host keeps what it compiles in its own folder.

    JAX lets process 0 alone write the persistent cache. But a pod's hosts have disks of their own,
    and even where they share one, a CPU's key differs by process: the others would compile anew at
    every start.
    """
    from jax._src.distributed import global_state

    own, global_state.process_id = global_state.process_id, 0
    try:
        yield
    finally:
        global_state.process_id = own


def wait_for_all_hosts(timeout_s: float) -> None:
    """Returns when every host has come here. HostFailure names a host that cannot, or the wait."""
    if jax.process_count() > 1:
        _exchange("ready", "yes", timeout_s)


def tell_failure(reason: str) -> None:
    """Ends the others' waits for this host, which cannot start."""
    client = _client()
    if client is None:
        return
    key = f"k3serve/failed/{this_host()}"
    try:
        _within(TELL_S, "host 0 does not answer", lambda: client.key_value_set(key, reason))
    except Exception as error:  # this host ends anyway, with its own reason
        log.warning("the other hosts could not be told: %s", error)


def leave(timeout_s: float) -> None:
    """Ends the hosts' connection, once each of them is to end. HostFailure if one does not come."""
    if jax.process_count() > 1:
        _within(
            timeout_s, f"not all hosts came to the end within {timeout_s:g} s",
            jax.distributed.shutdown,
        )  # fmt: skip


def check_others() -> None:
    """Raises HostFailure if another host has told that it cannot start."""
    client = _client()
    if client is None:
        return
    for host, reason in _told(client, "failed").items():
        raise HostFailure(f"host {host} could not start: {reason}")


def is_joined() -> bool:
    """Whether this host is one of several that have met."""
    return _client() is not None


def this_host() -> int:
    """This host's id, also where JAX's devices cannot be had."""
    from jax._src.distributed import global_state

    return int(global_state.process_id)


def _client() -> Any:
    """JAX's connection to the hosts' meeting point; None for a host that runs alone."""
    from jax._src.distributed import global_state

    return global_state.client


def _within(timeout_s: float, late: str, call: Callable[[], T]) -> T:
    """call(), in a thread that is left behind with a HostFailure when it takes too long."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="k3serve-hosts", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        raise HostFailure(late) from None


def _exchange(topic: str, value: str, timeout_s: float) -> dict[int, str]:
    """Every host's value, by host, once all have told theirs.

    By polling, not by JAX's barrier: a host that waits there hears nothing of one that failed.
    """
    client, count = _client(), jax.process_count()
    assert client is not None, "several processes, but jax.distributed is not up"
    late = (
        f"host 0, where the hosts meet, did not answer within {timeout_s:.0f} s "
        f"(--connect-timeout) while this host waited for all to get to '{topic}'"
    )
    return _within(timeout_s + LATE_S, late, lambda: _poll(client, count, topic, value, timeout_s))


def _poll(client: Any, count: int, topic: str, value: str, timeout_s: float) -> dict[int, str]:
    deadline = time.monotonic() + timeout_s
    client.key_value_set(f"k3serve/{topic}/{this_host()}", value)
    while True:
        told = _told(client, topic)
        if len(told) == count:
            return told
        check_others()
        if time.monotonic() > deadline:
            missing = ", ".join(str(i) for i in range(count) if i not in told)
            raise HostFailure(
                f"host {missing} did not get to '{topic}' within {timeout_s:.0f} s "
                "(--connect-timeout): look for an error in its log"
            )
        time.sleep(POLL_S)


def _told(client: Any, topic: str) -> dict[int, str]:
    try:
        entries = client.key_value_dir_get(f"k3serve/{topic}/")
    except Exception as error:
        raise HostFailure(f"host 0, where the hosts meet, does not answer: {error}") from error
    return {int(key.rpartition("/")[2]): value for key, value in entries}
