"""Start settings of a pod besides the plan: its identity, its peers' addresses, the ranks on its machine.

Stdlib only; pure.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from heteroinfer_contract import codec, names
from heteroinfer_contract.errors import ContractError, not_set
from heteroinfer_contract.plan import Device, Plan, RankAssignment

MAX_SECONDS = 7 * 86400.0
"""Maximum of every duration of a launch."""
MAX_PORT = 65535
MIN_HEARTBEAT_TIMEOUT_S = 0.5
"""Minimum heartbeat timeout: two heartbeats and some time for the network."""
_ENGINE_CPUS_OF_MANY = 2
"""CPUs for the engine core and vLLM's API server, which each spin on one CPU. When 16 threads of ranks used
all of 16 CPUs, a step took 258 ms instead of 56 ms (H200 host, 2026-11)."""
_MANY_CPUS = 8
"""From this number of CPUs on, the engine gets two CPUs of its own; with fewer CPUs, one."""
_VARIABLES: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "group": (names.ENV_GROUP, str),
    "group_uid": (names.ENV_GROUP_UID, str),
    "epoch": (names.ENV_EPOCH, int),
    "pod_index": (names.ENV_POD_INDEX, int),
    "addresses": (names.ENV_ADDRESSES, json.loads),
    "startup_timeout_s": (names.ENV_STARTUP_TIMEOUT, float),
    "drain_timeout_s": (names.ENV_DRAIN_TIMEOUT, float),
    "heartbeat_timeout_s": (names.ENV_HEARTBEAT_TIMEOUT, float),
    "network_interface": (names.ENV_NETWORK_INTERFACE, str),
    "cpu_binding": (names.ENV_CPU_BINDING, str),
}
"""Field of PodLaunch -> its variable, and the variable's parser."""
_FORMS: Final[Mapping[Callable[[str], Any], str]] = {
    int: "a whole number",
    float: "a number",
    json.loads: "JSON",
}
"""Parser -> the form that it requires, for errors."""


class CpuBinding(StrEnum):
    """Whether the threads of a pod's CPU ranks are bound to cores."""

    AUTO = "Auto"
    """If the pod's CPUs are exclusive: fewer than the machine has, and without a lower quota."""
    ALWAYS = "Always"
    """For machines without other computation; a quota still prevents binding."""
    NEVER = "Never"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAddress:
    """The address of a pod for the other pods of its group.

    Attributes:
        host: DNS name or IP address.
        api_port: OpenAI API (used on the leader only).
        control_port: the supervisor's handshake and heartbeat port (leader only).
        rendezvous_port: torch.distributed's TCPStore (leader only).
        executor_port: exchange of message queue handles (leader only).
        metrics_port: port of local rank 0; local rank i uses this port plus i.
    """

    host: str
    api_port: int = names.DEFAULT_API_PORT
    health_port: int = names.DEFAULT_HEALTH_PORT
    control_port: int = names.DEFAULT_CONTROL_PORT
    rendezvous_port: int = names.DEFAULT_RENDEZVOUS_PORT
    executor_port: int = names.DEFAULT_EXECUTOR_PORT
    metrics_port: int = names.DEFAULT_METRICS_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLaunch:
    """Identity of one pod of one epoch of a group.

    Attributes:
        group: `namespace/name/index`, for messages and metrics.
        epoch: number of the group's start; grows with each start.
        pod_index: this pod's index in the plan; 0 is the leader.
        addresses: addresses of all pods, by pod index.
        startup_timeout_s: longest time without progress between the connection of all pods and the readiness
            of all ranks.
        drain_timeout_s: time that running requests may take after the group is asked to stop.
        heartbeat_timeout_s: silence after which a peer's supervisor counts as lost.
        network_interface: interface of the process groups; `auto` selects the interface that routes to the
            leader.
    """

    group: str
    group_uid: str
    epoch: int
    pod_index: int
    addresses: tuple[PodAddress, ...]
    startup_timeout_s: float = 1800.0
    drain_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 1.5
    network_interface: str = "auto"
    cpu_binding: CpuBinding = CpuBinding.AUTO

    @property
    def leader(self) -> PodAddress:
        """Address of the pod of rank 0."""
        return self.addresses[0]

    @property
    def address(self) -> PodAddress:
        """Address of this pod."""
        return self.addresses[self.pod_index]

    def to_env(self) -> dict[str, str]:
        """Returns the launch as environment variables."""
        env = {name: str(getattr(self, field)) for field, (name, _) in _VARIABLES.items()}
        return env | {names.ENV_ADDRESSES: json.dumps([dataclasses.asdict(a) for a in self.addresses])}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "PodLaunch":
        """Returns the launch in an environment.

        Raises:
            ContractError: a variable is missing or malformed; the message names it.
        """
        raw = {field: _variable(env, name, parse) for field, (name, parse) in _VARIABLES.items()}
        return codec.from_mapping(cls, raw)

    def check(self) -> None:
        """Checks the epoch, durations, host names and ports; raises ContractError that names the field."""
        codec.at_least(0, "PodLaunch", epoch=self.epoch, drain_timeout_s=self.drain_timeout_s)
        codec.at_least(MIN_HEARTBEAT_TIMEOUT_S, "PodLaunch", heartbeat_timeout_s=self.heartbeat_timeout_s)
        for name in ("startup_timeout_s", "drain_timeout_s", "heartbeat_timeout_s"):
            codec.at_most(MAX_SECONDS, "PodLaunch", **{name: getattr(self, name)})
        if self.startup_timeout_s <= 0:
            raise ContractError(
                f"PodLaunch.startup_timeout_s: must be above 0 (got {self.startup_timeout_s}). "
                f"{codec.SAME_VERSION}"
            )
        for index, address in enumerate(self.addresses):
            where = f"{names.ENV_ADDRESSES}[{index}]"
            if not address.host:
                raise ContractError(
                    f"{where}.host: must be a name or an address (got none). {codec.SAME_VERSION}"
                )
            for field in dataclasses.fields(address):
                if field.name != "host":
                    codec.at_least(1, where, **{field.name: getattr(address, field.name)})
                    codec.at_most(MAX_PORT, where, **{field.name: getattr(address, field.name)})


def are_on_one_machine(launch: PodLaunch, pods: Iterable[int]) -> bool:
    """Returns whether these pods of the group have the same address, and so run on one machine.

    In a cluster each pod has its own address; under `heteroinfer up` all pods have the same address.
    """
    return len({launch.addresses[pod].host for pod in pods}) == 1


def ranks_on_machine(plan: Plan, launch: PodLaunch, device: Device | None = None) -> list[RankAssignment]:
    """Returns the ranks on this pod's machine, in rank order; with `device`, only its ranks."""
    return [
        rank
        for rank in plan.ranks
        if device in (None, rank.device) and are_on_one_machine(launch, (launch.pod_index, rank.pod))
    ]


def engine_cpus(usable: float) -> int:
    """Returns the number of CPUs that ranks leave to the engine and vLLM's API server.

    Args:
        usable: CPUs that a leader's ranks, the engine and vLLM's API server share.
    """
    if usable <= 1:
        return 0
    return _ENGINE_CPUS_OF_MANY if usable >= _MANY_CPUS else 1


def _variable(env: Mapping[str, str], name: str, parse: Callable[[str], Any]) -> Any:
    """Returns the parsed value of a variable; raises ContractError that names the variable."""
    if name not in env:
        raise not_set(name)
    try:
        return parse(env[name])
    except ValueError as error:
        raise ContractError(
            f"{name}: must be {_FORMS[parse]} (got {env[name]!r}: {error}). The operator sets this variable: "
            "use the same version of operator and worker"
        ) from error
