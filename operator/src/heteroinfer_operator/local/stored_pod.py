"""A pod in the memory of LocalCluster, with the fields that an API server would store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from heteroinfer_contract import names
from heteroinfer_contract.group_key import EpochKey, GroupKey
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_operator.cluster import ContainerTermination, Manifest, PodView
from heteroinfer_operator.local.process import RunningPod


@dataclass(slots=True, kw_only=True)
class StoredPod:
    """One pod. Only LocalCluster changes it.

    Attributes:
        gpus: the pod's GPUs, with their names in CUDA_VISIBLE_DEVICES.
        deleting: whether its deletion was requested.
        ready: last result of its readiness probe.
        termination: end of its supervisor; None while the pod runs.
        group_report: last report about its group; None if the pod is no leader.
        fetch: last report of its progress; None if the pod fetches no model.
    """

    manifest: Manifest
    uid: str
    running: RunningPod
    gpus: tuple[str, ...]
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    deleting: bool = False
    ready: bool = False
    termination: ContainerTermination | None = None
    group_report: GroupReport | None = None
    fetch: FetchProgress | None = None

    @property
    def name(self) -> str:
        return self.running.pod.name

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.manifest["metadata"].get("labels", {})
        return labels

    @property
    def group_index(self) -> int | None:
        """Index of the pod's group; None for a pod that reads or fetches the model."""
        index = self.labels.get(names.LABEL_GROUP)
        return None if index is None else int(index)

    @property
    def key(self) -> EpochKey | None:
        """Key of the pod's epoch, or None."""
        key, epoch = GroupKey.from_env(self.running.pod.env), self.running.pod.env.get(names.ENV_EPOCH)
        return None if key is None or epoch is None else key.of_epoch(int(epoch))

    @property
    def fetches(self) -> bool:
        return self.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_FETCH

    @property
    def leads(self) -> bool:
        """Whether the pod runs rank 0 of its group."""
        return self.labels.get(names.LABEL_LEADER) == "true"

    def view(self, node: str) -> PodView:
        """Returns the fields of the pod that the reconcile decisions read."""
        phase = "Running"
        if self.termination is not None:
            phase = "Succeeded" if self.termination.exit_code == 0 else "Failed"
        return PodView(
            name=self.name,
            uid=self.uid,
            labels=self.labels,
            created=self.created,
            deleting=self.deleting,
            started=True,
            phase=phase,
            ready=self.ready,
            node=node,
            termination=self.termination,
        )
