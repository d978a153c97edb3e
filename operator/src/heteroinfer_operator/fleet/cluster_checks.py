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
    InstalledCrd,
    InstalledOperator,
    describe_crd_skew,
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
"""Oldest supported version, equal to the chart's kubeVersion."""
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
"""Beginnings of the names of DaemonSets in kube-system that run such a network plugin."""


class CheckState(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """An optional feature is missing."""
    WARNING = "warning"
    """HeteroInfer works, but less well or less safely than it could."""
    UNKNOWN = "unknown"
    """The check has no result, for example because the user lacks a right."""
    FAILED = "failed"
    """HeteroInfer does not work in this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check. The message describes the result and the fix of a problem."""

    name: str
    state: CheckState
    message: str

    def dump(self) -> dict[str, str]:
        """Returns JSON values."""
        return {"name": self.name, "state": self.state.value, "message": self.message}


CheckAnswer = tuple[CheckState, str]
"""State and message of a check."""


async def run_checks(server: ApiServer) -> tuple[CheckResult, ...]:
    """Runs all checks of a cluster, without changing the cluster.

    Raises:
        ApiError: the API server does not answer.
    """
    cluster = _ClusterChecks(server)
    checks: Mapping[str, Callable[[], Awaitable[CheckAnswer]]] = {
        "Kubernetes": cluster.check_kubernetes,
        "CRD": cluster.check_crd,
        "operator": cluster.check_operator,
        "rights": cluster.check_rights,
        "GPU plugin": cluster.check_gpu_plugin,
        "GPU feature discovery": cluster.check_gpu_labels,
        "node feature discovery": cluster.check_cpu_labels,
        "gang scheduler": cluster.check_gang_scheduler,
        "ReadWriteMany class": cluster.check_shared_storage,
        "NetworkPolicy plugin": cluster.check_network_policies,
    }
    results = []
    for name, check in checks.items():
        try:
            state, message = await check()
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            state = CheckState.UNKNOWN
            message = f"{error.message}. Run the command with the rights of an administrator"
        results.append(CheckResult(name=name, state=state, message=message))
    return tuple(results)


class _ClusterChecks:
    """Reads the objects for each check from the API server, and judges them."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._operators: tuple[InstalledOperator, ...] = ()
        self._nodes: list[dict[str, Any]] | None = None

    async def check_kubernetes(self) -> CheckAnswer:
        version = await self._server.get("/version")
        return judge_kubernetes(
            str(version["major"]), str(version["minor"]), str(version.get("gitVersion", ""))
        )

    async def check_crd(self) -> CheckAnswer:
        """Checks that the API server serves HeteroInference; reports the version of the CRD."""
        problem = await resource_problem(self._server)
        if problem:
            return CheckState.FAILED, problem
        installed, refusal = await self._read_crd_if_allowed()
        if refusal:
            return (
                CheckState.OK,
                f"the API server serves HeteroInference; the version of the CRD is unknown ({refusal})",
            )
        return CheckState.OK, str(installed)

    async def check_operator(self) -> CheckAnswer:
        self._operators = await read_operators(self._server)
        crd, _ = await self._read_crd_if_allowed()
        return judge_operators(self._operators, crd.version if crd else UNKNOWN_VERSION)

    async def _read_crd_if_allowed(self) -> tuple[InstalledCrd | None, str]:
        """Returns the installed CRD, and the API server's refusal if the user may not read the CRD."""
        try:
            return await read_crd(self._server), ""
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return None, error.message

    async def check_rights(self) -> CheckAnswer:
        """Checks that each operator's service account has all rights that it needs."""
        if not self._operators:
            return (
                CheckState.UNKNOWN,
                "found no operator whose rights can be tested. Install HeteroInfer's chart",
            )
        missing = [
            f"{operator.name}: {right}"
            for operator in self._operators
            for right in await missing_rights_of(self._server, operator)
        ]
        if missing:
            return CheckState.FAILED, (
                f"the operator's service account lacks rights: {'; '.join(missing)}. Install the roles of "
                "HeteroInfer's chart"
            )
        accounts = ", ".join(f"{each.name.namespace}/{each.account}" for each in self._operators)
        return CheckState.OK, f"service account {accounts}"

    async def check_gpu_plugin(self) -> CheckAnswer:
        return judge_gpu_plugin(await self._read_nodes())

    async def check_gpu_labels(self) -> CheckAnswer:
        return judge_gpu_labels(await self._read_nodes())

    async def check_cpu_labels(self) -> CheckAnswer:
        return judge_cpu_labels(await self._read_nodes())

    async def check_gang_scheduler(self) -> CheckAnswer:
        """Reports the gang schedulers of the cluster. Groups also run without a gang scheduler."""
        is_served_or_error = await detect_gangs(self._server)
        served_gangs = [gang.value for gang, answer in is_served_or_error.items() if answer is True]
        if served_gangs:
            return CheckState.OK, ", ".join(served_gangs)
        return CheckState.NOTE, (
            "found no gang scheduler. The operator creates the pods of a group only if all pods fit the "
            "nodes, but another workload can take this capacity before Kubernetes schedules the pods. To "
            "prevent that, install a gang scheduler"
        )

    async def check_shared_storage(self) -> CheckAnswer:
        volumes = await self._server.get(_VOLUME.path())
        classes = await self._server.get(_STORAGE_CLASS.path())
        return judge_shared_storage(volumes["items"], classes["items"])

    async def check_network_policies(self) -> CheckAnswer:
        """Checks that the cluster has a network plugin that enforces NetworkPolicies.

        Such a plugin is recognized by an API group that it serves, or by a DaemonSet in kube-system.
        """
        api_groups = await self._server.get("/apis")
        served = [str(group["name"]) for group in api_groups["groups"]]
        plugins = {plugin for group, plugin in _POLICY_GROUPS.items() if group in served}
        if not plugins:
            daemons = await self._server.get(_DAEMON_SET.path("kube-system"))
            running = [str(daemon["metadata"]["name"]) for daemon in daemons["items"]]
            plugins = {name for name in running if name.startswith(_POLICY_DAEMONS)}
        if plugins:
            return CheckState.OK, ", ".join(sorted(plugins))
        return CheckState.WARNING, (
            "found no network plugin that is known to enforce NetworkPolicies. If your plugin ignores these "
            "policies, any pod can reach the ports of the groups. Check this in the plugin's documentation"
        )

    async def _read_nodes(self) -> Sequence[Mapping[str, Any]]:
        if self._nodes is None:
            self._nodes = (await self._server.get(NODE.path()))["items"]
        return self._nodes


async def missing_rights_of(server: ApiServer, operator: InstalledOperator) -> list[str]:
    """Asks the API server which rights the service account of an operator lacks.

    Returns a description of each missing right. The operator's settings decide which rights the operator
    needs. So if the settings are wrong, returns only the error in the settings.
    """
    try:
        # The Deployment has no values for these two variables, because Kubernetes takes them from the pod.
        from_pod = {
            "HETEROINFER_NAMESPACE": operator.name.namespace,
            "HETEROINFER_IDENTITY": operator.name.name,
        }
        settings = InstallationSettings.from_env({**operator.environment, **from_pod})
    except HeteroInferError as error:
        return [f"the operator's settings are wrong: {error.message}"]
    namespace = operator.name.namespace
    account = rights.ServiceAccount(namespace=namespace, name=operator.account)
    missing: list[str] = []
    all_namespaces = (None,)
    for watched in settings.watch_namespaces or all_namespaces:
        missing += await rights.find_missing_rights(server, rights.SERVED, watched, account)
    if not settings.watch_namespaces:
        missing += await rights.find_missing_rights(server, rights.CLUSTER, None, account)
    rules: tuple[rights.AccessRule, ...] = ()
    if settings.key_secret:
        rules += rights.key_rules(settings.key_secret, settings.former_key_secret)
    if settings.leader_election:
        rules += rights.lease_rules(settings.lease_name)
    return missing + await rights.find_missing_rights(server, rules, namespace, account)


def judge_kubernetes(major: str, minor: str, version: str) -> CheckAnswer:
    """Checks that the API server has at least the oldest version that HeteroInfer supports."""
    # Some providers report a minor version with a suffix, such as "31+".
    digits = "".join(character for character in minor if character.isdecimal())
    oldest = ".".join(map(str, MIN_KUBERNETES_VERSION))
    if not (major.isdecimal() and digits):
        return CheckState.UNKNOWN, (
            f"cannot parse the API server's version {version}. Check that the version is {oldest} or later"
        )
    if (int(major), int(digits)) < MIN_KUBERNETES_VERSION:
        return CheckState.FAILED, f"{version} is too old. Upgrade Kubernetes to {oldest} or later"
    return CheckState.OK, version


def judge_operators(operators: Sequence[InstalledOperator], crd_version: str) -> CheckAnswer:
    """Checks that each operator has a ready pod and the same version as the CRD.

    Reports only the most serious kind of problem: no replicas, no ready pod, then other versions.
    """
    if not operators:
        return CheckState.FAILED, "no operator is installed. Install HeteroInfer's chart"
    stopped = [
        f"{operator.name} has 0 replicas. Set the chart's value replicas to 1 or more"
        for operator in operators
        if not operator.replicas
    ]
    if stopped:
        return CheckState.FAILED, "; ".join(stopped)
    down = [
        f"{operator.name} has 0 of {operator.replicas} pods ready. Run `kubectl describe pods -n "
        f"{operator.name.namespace} -l app.kubernetes.io/name={names.MANAGER}`"
        for operator in operators
        if not operator.ready
    ]
    if down:
        return CheckState.FAILED, "; ".join(down)
    differing = [
        describe_crd_skew(operator, crd_version)
        for operator in operators
        if UNKNOWN_VERSION not in {crd_version, operator.version} and operator.version != crd_version
    ]
    if differing:
        return CheckState.WARNING, "; ".join(differing)
    described = ", ".join(
        f"{operator.name} {operator.version}, {operator.ready} of {operator.replicas} ready"
        for operator in operators
    )
    return CheckState.OK, described


def _usable_gpu_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the nodes with GPUs that can run the images."""
    return [
        node
        for node in nodes
        if _gpu_counts(node) and not describe_other_platform(IMAGE_PLATFORM, _labels(node))
    ]


def judge_gpu_plugin(nodes: Sequence[Mapping[str, Any]]) -> CheckAnswer:
    """Counts the GPUs of the nodes that can run the images. No GPU is only a note: GPUs are optional."""
    counts: dict[str, int] = {}
    with_gpus = _usable_gpu_nodes(nodes)
    for node in with_gpus:
        for resource, count in _gpu_counts(node).items():
            counts[resource] = counts.get(resource, 0) + count
    if not counts:
        return CheckState.NOTE, (
            f"no node with Linux on x86-64 offers {DEFAULT_GPU_RESOURCE}, so roles with device GPU cannot "
            "run. To use GPUs, add such a node, and install the NVIDIA device plugin"
        )
    described = ", ".join(f"{count} {resource}" for resource, count in sorted(counts.items()))
    return CheckState.OK, f"{described} on {_count_nodes(len(with_gpus))}"


def judge_gpu_labels(nodes: Sequence[Mapping[str, Any]]) -> CheckAnswer:
    """Checks that each node with GPUs has a label with the memory of its GPUs."""
    with_gpus = _usable_gpu_nodes(nodes)
    if not with_gpus:
        return CheckState.OK, "not needed: no node with Linux on x86-64 offers GPUs"
    unlabelled = [
        _name(node)
        for node in with_gpus
        if not any(f"{resource}.memory" in _labels(node) for resource in _gpu_counts(node))
    ]
    if unlabelled:
        return CheckState.WARNING, (
            f"{_count_nodes(len(unlabelled))} with GPUs ({_list_first(unlabelled)}) {_lack_verb(unlabelled)} "
            f"the label {DEFAULT_GPU_RESOURCE}.memory. Install GPU feature discovery, or set "
            "roles[].deviceMemory"
        )
    return CheckState.OK, f"the memory of GPUs is known on {_count_nodes(len(with_gpus))}"


def judge_cpu_labels(nodes: Sequence[Mapping[str, Any]]) -> CheckAnswer:
    """Checks that each node that can run the images has labels with the features of its CPU."""
    usable = [node for node in nodes if not describe_other_platform(IMAGE_PLATFORM, _labels(node))]
    if not usable:
        return CheckState.FAILED, "no node runs Linux on x86-64, the platform of the images. Add such a node"
    unlabelled = [
        _name(node) for node in usable if not any(key.startswith(CPUID_LABEL) for key in _labels(node))
    ]
    if unlabelled:
        return CheckState.WARNING, (
            f"{_count_nodes(len(unlabelled))} ({_list_first(unlabelled)}) {_lack_verb(unlabelled)} labels "
            f"{CPUID_LABEL}*, so plans do not know whether their CPUs have AMX or AVX-512. Install "
            "node-feature-discovery"
        )
    return CheckState.OK, f"the features of CPUs are known on {_count_nodes(len(usable))}"


def judge_shared_storage(
    volumes: Iterable[Mapping[str, Any]], classes: Iterable[Mapping[str, Any]]
) -> CheckAnswer:
    """Looks for a StorageClass with ReadWriteMany: several nodes can mount its volumes for writing.

    A volume with ReadWriteMany proves that its class supports this mode. Without such a volume, the name of
    the provisioner makes it likely.
    """
    proven = {
        str(volume["spec"].get("storageClassName") or "(none)")
        for volume in volumes
        if "ReadWriteMany" in volume["spec"].get("accessModes", ())
    }
    likely = {
        str(class_["metadata"]["name"])
        for class_ in classes
        if any(part in str(class_["provisioner"]) for part in _SHARED_PROVISIONERS)
    }
    if proven:
        return CheckState.OK, f"{', '.join(sorted(proven))} (has volumes with ReadWriteMany)"
    if likely:
        return CheckState.OK, f"{', '.join(sorted(likely))} (judged by the name of its provisioner)"
    return CheckState.NOTE, (
        "found no storage class with ReadWriteMany. A group with pods on several nodes needs such a class "
        "for the cache of a hub model (model.cache). Install a storage class with ReadWriteMany, or run all "
        "pods of a group on one node and set model.cache.accessMode to ReadWriteOnce"
    )


def _gpu_counts(node: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of GPUs that a node offers, by resource name."""
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


def _count_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _lack_verb(nodes: Sequence[str]) -> str:
    """Returns the verb after the names of nodes."""
    return "lacks" if len(nodes) == 1 else "lack"


def _list_first(items: Sequence[str], most: int = 3) -> str:
    """Returns the first names, and the number of further names."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"
