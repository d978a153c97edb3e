"""Reads facts about an installation: whether HeteroInference is served, its resources and missing rights."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube import rights
from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import NOT_FOUND, ONLY_METADATA, ApiError, ApiServer, load_configuration
from heteroinfer_operator.settings import InstallationSettings
from heteroinfer_operator.stored_fields import version_number

logger = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Interval of checks while the API server does not serve HeteroInference."""


async def wait_for_resource(server: ApiServer) -> None:
    """Waits until the API server serves HeteroInference; logs each new reason for the wait."""
    logged_problem = ""
    while True:
        problem = await resource_problem(server)
        if not problem:
            return
        if problem != logged_problem:
            logger.warning("waiting: %s", problem)
            logged_problem = problem
        await asyncio.sleep(POLL_S)


async def resource_problem(server: ApiServer) -> str:
    """Returns why HeteroInference cannot be read and how to fix that, or ""."""
    group_version = f"{names.API_GROUP}/{names.API_VERSION}"
    try:
        served = await server.get(f"/apis/{group_version}")
    except ApiError as error:
        if error.status != NOT_FOUND:
            return error.message
        served = {}  # the API server serves no resource of this group and version
    if any(resource["name"] == names.PLURAL for resource in served.get("resources", ())):
        return ""
    return (
        f"the API server does not serve {names.PLURAL} of {group_version}. Install the "
        "CustomResourceDefinition (chart value crds.install=true, or "
        "kubectl apply -f crds/heteroinference.yaml)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedResources:
    """The resources that this installation serves.

    Attributes:
        resources: resourceVersion of each resource.
        versions: resourceVersion of each list, by namespace; the key is None for the list of all namespaces.
        unread: error of each namespace that the operator could not list.
    """

    resources: Mapping[ResourceKey, int]
    versions: Mapping[str | None, int]
    unread: Mapping[str | None, ApiError]


async def list_resources(server: ApiServer, namespaces: Sequence[str]) -> ListedResources:
    """Lists the resources of all served namespaces.

    Raises:
        ApiError: no namespace can be listed.
    """
    versions_by_resource: dict[ResourceKey, int] = {}
    versions: dict[str | None, int] = {}
    unread: dict[str | None, ApiError] = {}

    async def list_scope(scope: str | None) -> None:
        """Lists the resources of a scope (None: all namespaces). Stores the error of a failed list."""
        listed: dict[ResourceKey, int] = {}
        try:
            async for page in server.list_pages(HETERO_INFERENCE.path(scope), {}, accept=ONLY_METADATA):
                for item in page.get("items") or ():  # an empty list of metadata has null instead of []
                    metadata = item["metadata"]
                    key = ResourceKey(namespace=metadata["namespace"], name=metadata["name"])
                    listed[key] = version_number(metadata["resourceVersion"])
                versions[scope] = version_number(page["metadata"]["resourceVersion"])
        except ApiError as error:
            unread[scope] = error
        else:  # leave out the first pages of a list that failed later
            versions_by_resource.update(listed)

    scopes: list[str | None] = [*namespaces] or [None]
    await asyncio.gather(*map(list_scope, scopes))
    if len(unread) == len(scopes):
        raise next(iter(unread.values()))
    return ListedResources(resources=versions_by_resource, versions=versions, unread=unread)


async def find_missing_parts(settings: InstallationSettings) -> list[str]:
    """Returns a message for each missing part of an installation: the CRD, or a right. Changes nothing.

    Raises:
        HeteroInferError: the API server cannot be reached.
    """
    server = ApiServer(await load_configuration())
    try:
        problem = await resource_problem(server)
        missing_rights = await _find_missing_rights(server, settings)
    finally:
        await server.close()
    fix = "Install the roles of HeteroInfer's chart"
    messages = [f"missing right: {right}. {fix}" for right in missing_rights]
    return [problem, *messages] if problem else messages


async def _find_missing_rights(server: ApiServer, settings: InstallationSettings) -> list[str]:
    """Returns the rights that an operator with these settings needs and the user of `server` lacks."""
    missing: list[str] = []
    for namespace in settings.watch_namespaces or (None,):  # None: all namespaces
        missing += await rights.find_missing_rights(server, rights.SERVED, namespace)
    if not settings.watch_namespaces:
        missing += await rights.find_missing_rights(server, rights.CLUSTER, None)
    if settings.key_secret:
        key_rules = rights.key_rules(settings.key_secret, settings.former_key_secret)
        missing += await rights.find_missing_rights(server, key_rules, settings.namespace)
    if settings.leader_election:
        lease_rules = rights.lease_rules(settings.lease_name)
        missing += await rights.find_missing_rights(server, lease_rules, settings.namespace)
    return missing
