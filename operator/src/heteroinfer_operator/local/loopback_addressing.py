"""Addresses of pods on this machine: loopback and free ports, instead of pod names and fixed ports."""

import random
import socket
from pathlib import Path
from typing import Final

from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodAddress
from heteroinfer_operator.api import MAX_GROUPS, HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import (
    DEFAULT_REVISION,
    ModelFetch,
    ModelSource,
    hub_repository,
)
from heteroinfer_operator.manifests.identity import EpochRef, Owner

LOOPBACK: Final = "127.0.0.1"
_PORT_RANGE: Final = range(20000, 32000)
"""Below the ports that Linux gives to outgoing connections (32768 and up), so that a free port is still free
a moment later, when the worker binds it."""
_ATTEMPTS: Final = 1000


class PortsTakenError(PlanError):
    """A requested port is in use, or no free port is left."""

    reason = "PortTaken"


class LocalAddressing:
    """Addresses of the groups of one resource on this machine.

    Each reconcile requests the addresses of an epoch again, so an epoch keeps its ports.

    Args:
        api_port: port of group 0; group i serves on this port plus i.
        model_cache: folder for models from a hub.
    """

    def __init__(self, *, api_port: int, model_cache: Path, rng: random.Random | None = None) -> None:
        self._api_port = api_port
        self._model_cache = model_cache
        self._fetch_port: int | None = None
        self._rng = rng or random.Random()  # noqa: S311 - ports are public
        self._addresses_by_epoch: dict[tuple[int, int, str], tuple[PodAddress, ...]] = {}
        """By index of the group, epoch and hash of the plan."""
        self._taken_ports = set(range(api_port, api_port + MAX_GROUPS))

    def pods(self, spec: HeteroInferenceSpec, group: EpochRef, plan: Plan) -> tuple[PodAddress, ...]:
        """Returns the addresses of an epoch's pods; chooses free ports the first time.

        Raises:
            PortsTakenError: no free ports are left.
        """
        key = (group.index, group.epoch, plan.hash)
        if key not in self._addresses_by_epoch:
            self._addresses_by_epoch[key] = tuple(
                self._build_address(group.index, len(pod.ranks)) for pod in plan.pods
            )
        return self._addresses_by_epoch[key]

    def find_model_source(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
        """Returns the folder of the model on this machine, or how to fetch the model into its cache.

        Raises:
            PlanError: model.uri is neither a folder of this machine nor a model of a hub.
        """
        scheme, _, path = spec.model.uri.partition("://")
        if identity.is_hub_model(spec):
            return self._hub_model(spec)
        if scheme != "file":
            raise PlanError(
                f"model.uri {spec.model.uri} is not on this machine. Download the model "
                "(hf download ORG/MODEL --local-dir DIR) and use --model-dir DIR",
                reason="ModelSourceNotSupported",
            )
        return ModelSource(path=path, volume=None)

    def _hub_model(self, spec: HeteroInferenceSpec) -> ModelSource:
        """Returns how to fetch a hub model into the cache of this machine."""
        if self._fetch_port is None:
            self._fetch_port = self._take_ports(1)
        fetch = ModelFetch(
            repository=hub_repository(spec),
            revision=spec.model.revision or DEFAULT_REVISION,
            cache=str(self._model_cache),
            token=None,  # Secrets do not exist here; the token is in the environment or from `hf auth login`
            health_host=LOOPBACK,
            health_port=self._fetch_port,
        )
        return ModelSource(path=fetch.cache, volume=None, fetch=fetch)

    def endpoint(self, spec: HeteroInferenceSpec, owner: Owner) -> str:
        """Returns the base URL of group 0."""
        return self.group_endpoint(0)

    def group_endpoint(self, index: int) -> str:
        """Returns the base URL of a group's OpenAI API."""
        return f"http://{LOOPBACK}:{self._api_port + index}/v1"

    def current_addresses(self) -> dict[int, tuple[PodAddress, ...]]:
        """Returns the addresses of the pods of each group's newest epoch, by group index."""
        by_group: dict[int, tuple[PodAddress, ...]] = {}
        for index, epoch, plan_hash in sorted(self._addresses_by_epoch):
            by_group[index] = self._addresses_by_epoch[index, epoch, plan_hash]  # replaces an earlier epoch
        return by_group

    def check_api_ports(self, groups: int) -> None:
        """Raises an error unless every group can serve on its port.

        Raises:
            PortsTakenError: another program listens on one of the ports.
        """
        for port in range(self._api_port, self._api_port + groups):
            if not is_free(port):
                raise PortsTakenError(
                    f"port {port} on {LOOPBACK}: another program uses the port, which the OpenAI API needs. "
                    "Stop that program, or choose another port with --port"
                )

    def _build_address(self, group: int, num_ranks: int) -> PodAddress:
        """Builds the address of a pod with free ports."""
        return PodAddress(
            host=LOOPBACK,
            api_port=self._api_port + group,
            health_port=self._take_ports(1),
            control_port=self._take_ports(1),
            rendezvous_port=self._take_ports(1),
            executor_port=self._take_ports(1),
            metrics_port=self._take_ports(num_ranks),
        )

    def _take_ports(self, size: int) -> int:
        """Takes `size` consecutive free ports, so that no later call takes them. Returns the first port."""
        for _ in range(_ATTEMPTS):
            first = self._rng.choice(_PORT_RANGE)
            block = set(range(first, first + size))
            if not block & self._taken_ports and all(is_free(port) for port in block):
                self._taken_ports |= block
                return first
        raise PortsTakenError(
            f"ports {_PORT_RANGE.start}-{_PORT_RANGE.stop - 1} on {LOOPBACK}: must have {size} consecutive "
            "free ports for a pod. Stop the programs that use these ports"
        )


def is_free(port: int) -> bool:
    """Reports whether a server could listen on this port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this option, too. With it, closed connections (TIME_WAIT) of the last epoch do not block
        # the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
