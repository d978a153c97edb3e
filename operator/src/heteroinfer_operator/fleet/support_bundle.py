"""Gathers the facts about one HeteroInference that help to find a fault, without secrets.

Reads no Secret. `missing.txt` lists the parts that could not be read, for example because the user lacks a
right.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.fleet.fleet_reader import LeaderReader, StoredResource
from heteroinfer_operator.fleet.installations import InstalledOperator, read_crd, read_operators
from heteroinfer_operator.fleet.lines import build_line
from heteroinfer_operator.fleet.redaction import redact_object, redact_text
from heteroinfer_operator.fleet.summary import ResourceSummary
from heteroinfer_operator.kube.paths import CHILDREN, CONFIG_MAP, EVENT, NODE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer, Query
from heteroinfer_operator.version import own_version

LOG_LINES: Final = 5000
LOG_BYTES: Final = 4 * 2**20
"""Longest log, in bytes. The API server cuts off the rest of a log."""


class SupportBundle:
    """Gathers the files of a support bundle and packs them.

    If a part cannot be read, the bundle contains the other parts.

    Attributes:
        missing: a line for each part that could not be read.
    """

    def __init__(self, server: ApiServer, resource: StoredResource) -> None:
        self.missing: list[str] = []
        self._server = server
        self._resource = resource
        self._files: dict[str, str] = {}

    async def gather(self) -> None:
        """Reads all parts of the bundle. Notes parts that cannot be read in `missing`."""
        self._add_object("resource.yaml", self._resource.manifest)
        await self._add_status()
        pods = await self._add_children()
        await self._add_events(pods)
        for pod in pods:
            await self._add_logs(f"logs/{pod['metadata']['name']}", pod)
        await self._add_nodes({str(pod["spec"].get("nodeName") or "") for pod in pods} - {""})
        await self._add_versions_and_operator_logs()
        if self.missing:
            self._files["missing.txt"] = "".join(f"{line}\n" for line in self.missing)

    def pack(self, folder: str) -> bytes:
        """Returns all parts as a tar.gz file, in a folder with this name."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path, text in sorted(self._files.items()):
                content = text.encode("utf-8", errors="replace")
                entry = tarfile.TarInfo(f"{folder}/{path}")
                entry.size = len(content)
                entry.mtime = int(datetime.now(UTC).timestamp())
                entry.mode = 0o600
                archive.addfile(entry, io.BytesIO(content))
        return packed.getvalue()

    async def _add_status(self) -> None:
        """Adds the text of `heteroinfer status --verbose`."""
        resource = self._resource
        live = await LeaderReader(self._server).read([resource])
        line = build_line(resource.key, resource.status, live.get(resource.key, {}))
        summary = ResourceSummary(manifest=resource.manifest, status=resource.status, line=line)
        lines = summary.render(datetime.now(UTC), verbose=True)
        self._files["status.txt"] = redact_text("".join(f"{each}\n" for each in lines))

    async def _add_children(self) -> list[Manifest]:
        """Adds the objects of the resource, and the plans in its ConfigMaps; returns its pods."""
        key = self._resource.key
        pods: list[Manifest] = []
        for kind in (POD, *CHILDREN):
            selector = {"labelSelector": f"{names.LABEL_RESOURCE}={key.name}"}
            children = await self._list(kind.path(key.namespace), selector)
            for each in children:
                # Items of a list lack these two fields.
                manifest = {"apiVersion": kind.api_version, "kind": kind.name, **each}
                name = each["metadata"]["name"]
                self._add_object(f"manifests/{kind.plural}/{name}.yaml", manifest)
                plan = (each.get("data") or {}).get(names.PLAN_KEY) if kind is CONFIG_MAP else None
                if plan is not None:
                    self._files[f"plans/{name}.json"] = redact_text(plan)
            pods += children if kind is POD else []
        return pods

    async def _add_events(self, pods: Iterable[Manifest]) -> None:
        """Adds the events about the resource and its objects."""
        key = self._resource.key
        known_names = {key.name, *(str(pod["metadata"]["name"]) for pod in pods)}
        events = [
            redact_object(event)
            for event in await self._list(EVENT.path(key.namespace))
            if _is_about(event, key.name, known_names)
        ]
        self._files["events.yaml"] = yaml.safe_dump(events, sort_keys=False)

    async def _add_logs(self, folder: str, pod: Manifest) -> None:
        """Adds the log of each container of a pod, and the log of the container's previous run."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        path = POD.path(metadata["namespace"], metadata["name"], "log")
        states = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        for state in states:
            container = str(state["name"])
            has_restarted = bool(state.get("restartCount"))
            has_run = bool(state.get("containerID")) or has_restarted
            if has_run:
                await self._add_log(f"{folder}/{container}.log", path, {"container": container})
            if not has_restarted:
                continue
            file = f"{folder}/{container}.previous.log"
            # The kubelet has the log of the previous run only if the status has the id of its container.
            previous_run = (state.get("lastState") or {}).get("terminated") or {}
            if previous_run.get("containerID"):
                await self._add_log(file, path, {"container": container, "previous": "true"})
            else:
                self.missing.append(
                    f"{file}: the pod's node has no log of the previous run of this container"
                )

    async def _add_log(self, file: str, path: str, query: Query) -> None:
        """Adds the last lines of a log to the bundle, without secrets."""
        limits: Query = {"tailLines": LOG_LINES, "limitBytes": LOG_BYTES, "timestamps": "true"}
        try:
            self._files[file] = redact_text(await self._server.get_text(path, {**query, **limits}))
        except ApiError as error:
            self.missing.append(f"{file}: {error.message}")

    async def _add_nodes(self, nodes: Iterable[str]) -> None:
        """Adds the objects of the nodes on which the pods run."""
        for name in sorted(nodes):
            try:
                node = await self._server.get(NODE.path(None, name))
            except ApiError as error:
                self.missing.append(f"nodes/{name}.yaml: {error.message}")
            else:
                self._add_object(f"nodes/{name}.yaml", node)

    async def _add_versions_and_operator_logs(self) -> None:
        """Adds the versions of Kubernetes, operators and CRD, and the logs of the operators."""
        value: dict[str, Any] = {"client": own_version()}
        operators: tuple[InstalledOperator, ...] = ()
        try:
            value["kubernetes"] = (await self._server.get("/version")).get("gitVersion")
            operators = await read_operators(self._server)
            value["operators"] = [operator.dump() for operator in operators]
            crd = await read_crd(self._server)
            value["crd"] = crd and crd.dump()
        except ApiError as error:
            self.missing.append(f"versions.json: {error.message}")
        self._files["versions.json"] = json.dumps(value, indent=2) + "\n"
        selector = {"labelSelector": f"app.kubernetes.io/name={names.MANAGER}"}
        for namespace in sorted({operator.name.namespace for operator in operators}):
            for pod in await self._list(POD.path(namespace), selector):
                await self._add_logs(f"operator/{pod['metadata']['name']}", pod)

    async def _list(self, path: str, query: Query | None = None) -> list[Manifest]:
        """Returns the objects of a list. After an error, returns [] and notes the error in `missing`."""
        try:
            return list((await self._server.get(path, query))["items"])
        except ApiError as error:
            self.missing.append(error.message)
            return []

    def _add_object(self, path: str, manifest: Manifest) -> None:
        self._files[path] = yaml.safe_dump(redact_object(manifest), sort_keys=False)


def _is_about(event: Mapping[str, Any], name: str, known_names: set[str]) -> bool:
    """Reports whether an event is about the resource or one of its objects.

    Args:
        name: name of the resource. The names of its objects begin with this name.
        known_names: names of the resource and of its pods.
    """
    regarding = str((event.get("regarding") or {}).get("name", ""))
    return regarding in known_names or regarding.startswith(f"{name}-")
