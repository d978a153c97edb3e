"""Checks a cluster for the requirements of HeteroInfer and for optional features, for administrators."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api.role import DEFAULT_GPU_RESOURCE
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.installations import (
    UNKNOWN_VERSION,
    InstalledOperator,
    read_crd,
    read_operators,
)
from heteroinfer_operator.kube import rights
from heteroinfer_operator.kube.gangs import detect_gangs
from heteroinfer_operator.kube.installation import resource_problem
from heteroinfer_operator.kube.paths import NODE, Kind
from heteroinfer_operator.kube.server import FORBIDDEN, ApiError, ApiServer
from heteroinfer_operator.nodes.cpu_features import CPUID_LABEL
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM, describe_other_platform
from heteroinfer_operator.settings import InstallationSettings

MIN_KUBERNETES_VERSION: Final = (1, 30)
"""As the chart's kubeVersion."""
_GPU_RESOURCES: Final = "nvidia.com/"
_VOLUME: Final = Kind(name="PersistentVolume", api_version="v1", plural="persistentvolumes", namespaced=False)
_STORAGE_CLASS: Final = Kind(
    name="StorageClass", api_version="storage.k8s.io/v1", plural="storageclasses", namespaced=False
)
_DAEMON_SET: Final = Kind(name="DaemonSet", api_version="apps/v1", plural="daemonsets")
_SHARED_PROVISIONERS: Final = (
    "cephfs", "nfs", "efs.csi.aws.com", "file.csi.azure.com", "filestore.csi.storage.gke.io", "glusterfs",
    "lustre", "fsx.", "beegfs", "juicefs", "longhorn", "weka", "wekafs", "smb.csi.k8s.io", "quobyte",
)  # fmt: skip
"""Parts of the names of provisioners whose volumes several nodes can mount for writing."""
_POLICY_GROUPS: Final = {
    "crd.projectcalico.org": "Calico",
    "projectcalico.org": "Calico",
    "cilium.io": "Cilium",
    "crd.antrea.io": "Antrea",
    "k8s.ovn.org": "OVN-Kubernetes",
    "kubeovn.io": "Kube-OVN",
    "networking.k8s.aws": "Amazon VPC CNI",
}
"""API groups of network plugins that enforce NetworkPolicies."""
_POLICY_DAEMONS: Final = (
    "kube-router",
    "weave-net",
    "kindnet",
    "azure-npm",
    "calico-node",
    "cilium",
    "canal",
)
"""Names of DaemonSets of such plugins."""


class CheckState(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """An optional feature is missing."""
    WARNING = "warning"
    """HeteroInfer works, but less well or less safely than it could."""
    UNKNOWN = "unknown"
    """The user lacks the right to find out."""
    FAILED = "failed"
    """HeteroInfer does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check, with what to do in its message."""

    name: str
    state: CheckState
    message: str

    def dump(self) -> dict[str, str]:
        """Returns JSON values."""
        return {"name": self.name, "state": self.state.value, "message": self.message}


CheckAnswer = tuple[CheckState, str]


async def run_checks(server: ApiServer) -> tuple[CheckResult, ...]:
    """Runs all checks; changes nothing.

    Raises:
        ApiError: the API server does not answer.
    """
    reader = _ClusterReader(server)
    checks: Mapping[str, Callable[[], Awaitable[CheckAnswer]]] = {
        "Kubernetes": reader.kubernetes,
        "CRD": reader.crd,
        "operator": reader.operator,
        "rights": reader.rights,
        "GPU plugin": reader.gpu_plugin,
        "GPU feature discovery": reader.gpu_labels,
        "node feature discovery": reader.cpu_labels,
        "gang scheduler": reader.gang_scheduler,
        "ReadWriteMany class": reader.shared_storage,
        "NetworkPolicy plugin": reader.network_policies,
    }
    results = []
    for name, check in checks.items():
        try:
            state, message = await check()
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            state, message = CheckState.UNKNOWN, f"{error.message}. Run this as an administrator"
        results.append(CheckResult(name=name, state=state, message=message))
    return tuple(results)


class _ClusterReader:
    """The checks: each reads its own objects."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._operators: tuple[InstalledOperator, ...] = ()
        self._nodes: list[dict[str, Any]] | None = None

    async def kubernetes(self) -> CheckAnswer:
        found = await self._server.get("/version")
        return judge_kubernetes(str(found["major"]), str(found["minor"]), str(found.get("gitVersion", "")))

    async def crd(self) -> CheckAnswer:
        problem = await resource_problem(self._server)
        if problem:
            return CheckState.FAILED, problem
        try:
            installed = await read_crd(self._server)
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return CheckState.OK, f"served; its version is unknown ({error.message})"
        return CheckState.OK, str(installed)

    async def operator(self) -> CheckAnswer:
        self._operators = await read_operators(self._server)
        crd = await read_crd(self._server)
        return judge_operators(self._operators, crd.version if crd else UNKNOWN_VERSION)

    async def rights(self) -> CheckAnswer:
        if not self._operators:
            return CheckState.UNKNOWN, "no operator was found whose rights could be checked"
        missing = [
            f"{operator.name}: {right}"
            for operator in self._operators
            for right in await missing_rights_of(self._server, operator)
        ]
        if missing:
            return CheckState.FAILED, f"missing: {'; '.join(missing)}. Install the chart's roles"
        accounts = ", ".join(f"{each.name.namespace}/{each.account}" for each in self._operators)
        return CheckState.OK, f"service account {accounts}"

    async def gpu_plugin(self) -> CheckAnswer:
        return judge_gpu_plugin(await self._read_nodes())

    async def gpu_labels(self) -> CheckAnswer:
        return judge_gpu_labels(await self._read_nodes())

    async def cpu_labels(self) -> CheckAnswer:
        return judge_cpu_labels(await self._read_nodes())

    async def gang_scheduler(self) -> CheckAnswer:
        found = [gang.value for gang, served in (await detect_gangs(self._server)).items() if served is True]
        if found:
            return CheckState.OK, ", ".join(found)
        return CheckState.NOTE, (
            "none. The operator starts a group only if all its pods have nodes, but another workload can "
            "take the room in between"
        )

    async def shared_storage(self) -> CheckAnswer:
        volumes = await self._server.get(_VOLUME.path())
        classes = await self._server.get(_STORAGE_CLASS.path())
        return judge_shared_storage(volumes["items"], classes["items"])

    async def network_policies(self) -> CheckAnswer:
        groups = await self._server.get("/apis")
        served = [str(group["name"]) for group in groups["groups"]]
        found = {plugin for group, plugin in _POLICY_GROUPS.items() if group in served}
        if not found:
            daemons = await self._server.get(_DAEMON_SET.path("kube-system"))
            running = [str(each["metadata"]["name"]) for each in daemons["items"]]
            found = {name for name in running if name.startswith(_POLICY_DAEMONS)}
        if found:
            return CheckState.OK, ", ".join(sorted(found))
        return CheckState.WARNING, (
            "no known network plugin was found. If yours ignores NetworkPolicies, any pod can reach "
            "the ports of the groups"
        )

    async def _read_nodes(self) -> Sequence[Mapping[str, Any]]:
        if self._nodes is None:
            self._nodes = (await self._server.get(NODE.path()))["items"]
        return self._nodes


async def missing_rights_of(server: ApiServer, operator: InstalledOperator) -> list[str]:
    """Asks the API server which rights the service account of an operator lacks."""
    try:
        # The chart takes these two from the pod.
        own = {"HETEROINFER_NAMESPACE": operator.name.namespace, "HETEROINFER_IDENTITY": operator.name.name}
        settings = InstallationSettings.from_env({**operator.environment, **own})
    except HeteroInferError as error:
        return [f"its settings are wrong: {error.message}"]
    namespace = operator.name.namespace
    account = rights.ServiceAccount(namespace=namespace, name=operator.account)
    missing: list[str] = []
    for served in settings.watch_namespaces or (None,):
        missing += await rights.find_missing_rights(server, rights.SERVED, served, account)
    if not settings.watch_namespaces:
        missing += await rights.find_missing_rights(server, rights.CLUSTER, None, account)
    rules: tuple[rights.AccessRule, ...] = ()
    if settings.key_secret:
        rules += rights.key_rules(settings.key_secret, settings.former_key_secret)
    if settings.leader_election:
        rules += rights.lease_rules(settings.lease_name)
    return missing + await rights.find_missing_rights(server, rules, namespace, account)


def judge_kubernetes(major: str, minor: str, version: str) -> CheckAnswer:
    """Compares the API server's version with the oldest one that HeteroInfer supports."""
    digits = "".join(character for character in minor if character.isdecimal())
    least = ".".join(map(str, MIN_KUBERNETES_VERSION))
    if not (major.isdecimal() and digits):
        return CheckState.UNKNOWN, f"cannot read version {version}. HeteroInfer needs {least} or later"
    if (int(major), int(digits)) < MIN_KUBERNETES_VERSION:
        return CheckState.FAILED, f"{version} is too old. Upgrade to {least} or later"
    return CheckState.OK, version


def judge_operators(operators: Sequence[InstalledOperator], crd_version: str) -> CheckAnswer:
    """Checks that each operator has a ready pod, and the version of the CRD."""
    if not operators:
        return CheckState.FAILED, "not installed. Install HeteroInfer's chart"
    stopped = [str(each.name) for each in operators if not each.replicas]
    if stopped:
        return CheckState.FAILED, (
            f"{', '.join(stopped)} has 0 replicas. Set the chart's value replicas to 1 or more"
        )
    down = [
        f"{each.name} has 0 of {each.replicas} pods ready. Run `kubectl describe pods -n "
        f"{each.name.namespace} -l app.kubernetes.io/name={names.MANAGER}`"
        for each in operators
        if not each.ready
    ]
    if down:
        return CheckState.FAILED, "; ".join(down)
    skew = [
        f"{each.name} has version {each.version}, but the CRD has version {crd_version}. Upgrade the chart "
        "that installs the CRD"
        for each in operators
        if UNKNOWN_VERSION not in {crd_version, each.version} and each.version != crd_version
    ]
    if skew:
        return CheckState.WARNING, "; ".join(skew)
    found = ", ".join(
        f"{each.name} {each.version}, {each.ready} of {each.replicas} ready" for each in operators
    )
    return CheckState.OK, found


def judge_gpu_plugin(nodes: Sequence[Mapping[str, Any]]) -> CheckAnswer:
    """Checks that nodes offer GPUs."""
    counts: dict[str, int] = {}
    with_gpus = [node for node in nodes if _gpus(node)]
    for node in with_gpus:
        for resource, count in _gpus(node).items():
            counts[resource] = counts.get(resource, 0) + count
    if not counts:
        return CheckState.NOTE, (
            f"no node offers {DEFAULT_GPU_RESOURCE}, so roles with device GPU cannot run. To use GPUs, "
            "install the NVIDIA device plugin"
        )
    found = ", ".join(f"{count} {resource}" for resource, count in sorted(counts.items()))
    return CheckState.OK, f"{found} on {_nodes(len(with_gpus))}"


def judge_gpu_labels(nodes: Sequence[Mapping[str, Any]]) -> CheckAnswer:
    """Checks that nodes with GPUs are labelled with the memory of a GPU."""
    with_gpus = [node for node in nodes if _gpus(node)]
    if not with_gpus:
        return CheckState.OK, "not needed: no node offers GPUs"
    without = [
        _name(node)
        for node in with_gpus
        if not any(f"{resource}.memory" in _labels(node) for resource in _gpus(node))
    ]
    if without:
        return CheckState.WARNING, (
            f"{_nodes(len(without))} with GPUs ({_first_names(without)}) {_nodes_without(without)} the label "
            f"{DEFAULT_GPU_RESOURCE}.memory. Install GPU feature discovery, or set roles[].deviceMemory"
        )
    return CheckState.OK, f"the memory of GPUs is known on {_nodes(len(with_gpus))}"


def judge_cpu_labels(nodes: Sequence[Mapping[str, Any]]) -> CheckAnswer:
    """Checks that nodes which can run the images are labelled with the features of their CPUs."""
    usable = [node for node in nodes if not describe_other_platform(IMAGE_PLATFORM, _labels(node))]
    if not usable:
        return CheckState.FAILED, "no node runs Linux on x86-64, the platform of the images"
    without = [
        _name(node) for node in usable if not any(key.startswith(CPUID_LABEL) for key in _labels(node))
    ]
    if without:
        return CheckState.WARNING, (
            f"{_nodes(len(without))} ({_first_names(without)}) {_nodes_without(without)} labels "
            f"{CPUID_LABEL}*, so plans do not know whether their CPUs have AMX or AVX-512. Install "
            "node-feature-discovery"
        )
    return CheckState.OK, f"the features of CPUs are known on {_nodes(len(usable))}"


def judge_shared_storage(
    volumes: Iterable[Mapping[str, Any]], classes: Iterable[Mapping[str, Any]]
) -> CheckAnswer:
    """Looks for a storage class whose volumes pods on several nodes can mount for writing."""
    proven = {
        str(volume["spec"].get("storageClassName") or "(none)")
        for volume in volumes
        if "ReadWriteMany" in volume["spec"].get("accessModes", ())
    }
    likely = {
        str(each["metadata"]["name"])
        for each in classes
        if any(part in str(each["provisioner"]) for part in _SHARED_PROVISIONERS)
    }
    if proven:
        return CheckState.OK, f"{', '.join(sorted(proven))} (has such volumes)"
    if likely:
        return CheckState.OK, f"{', '.join(sorted(likely))} (by the name of the provisioner)"
    return CheckState.NOTE, (
        "none is known. If pods of a group run on different nodes, a hub model needs such a class for "
        "model.cache, or model.cache.accessMode: ReadWriteOnce with all pods on one node"
    )


def _gpus(node: Mapping[str, Any]) -> dict[str, int]:
    offered = (node.get("status") or {}).get("allocatable") or {}
    return {
        key: int(count)
        for key, count in offered.items()
        if key.startswith(_GPU_RESOURCES) and str(count).isdecimal() and int(count)
    }


def _labels(node: Mapping[str, Any]) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def _name(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _nodes_without(nodes: Sequence[str]) -> str:
    return "lacks" if len(nodes) == 1 else "lack"


def _first_names(found: Sequence[str], most: int = 3) -> str:
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{', '.join(found[:most])}{more}"
