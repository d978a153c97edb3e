"""The options that choose a cluster and a namespace, and the connection to that cluster."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from kubernetes.aio import config
from kubernetes.aio.config import ConfigException

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.server import ApiServer, find_kubeconfigs, load_configuration

FIELD_MANAGER: Final = "heteroinfer-cli"
"""Field manager of the fields that a command writes. The operator has a field manager of its own."""
_DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """An open connection to the API server that the options name.

    Attributes:
        namespace: the namespace of `-n`, otherwise of the kubeconfig's context, otherwise `default`.
    """

    server: ApiServer
    namespace: str


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--kubeconfig` and `--context`, with the meaning that they have for kubectl."""
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="kubeconfig to use; default: $KUBECONFIG, or ~/.kube/config if the variable is not set",
    )
    parser.add_argument(
        "--context", metavar="NAME", help="context of the kubeconfig; default: its current context"
    )


def add_namespace_option(parser: argparse._ActionsContainer) -> None:
    """Adds `-n`."""
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NS",
        help="namespace; default: the namespace of the kubeconfig's context",
    )


def add_selector_option(parser: argparse._ActionsContainer) -> None:
    """Adds `-l`."""
    parser.add_argument(
        "-l", "--selector", metavar="LABELS", help="only resources with these labels, such as team=search"
    )


@asynccontextmanager
async def open_cluster(arguments: argparse.Namespace) -> AsyncIterator[ClusterAccess]:
    """Connects to the cluster that the options name, and closes the connection in the end.

    Raises:
        HeteroInferError: there is no such kubeconfig or context, and this process does not run in a pod.
    """
    namespace = _namespace_of_context(arguments.kubeconfig, arguments.context)
    configuration = await load_configuration(arguments.kubeconfig, arguments.context)
    server = ApiServer(configuration, agent=FIELD_MANAGER)
    try:
        yield ClusterAccess(
            server=server, namespace=getattr(arguments, "namespace", None) or namespace or _DEFAULT_NAMESPACE
        )
    finally:
        await server.close()


def _namespace_of_context(kubeconfig: str | None, context: str | None) -> str | None:
    """Returns the namespace of the context, or None if the kubeconfig names none or cannot be read.

    Raises:
        HeteroInferError: the named context does not exist.
    """
    if not find_kubeconfigs(kubeconfig):
        return None
    list_contexts: Any = config.list_kube_config_contexts
    try:
        contexts, active = list_contexts(kubeconfig)
    except ConfigException:
        return None  # load_configuration reports the error in the file
    if context is not None:
        active = next((each for each in contexts if each["name"] == context), None)
        if active is None:
            known = ", ".join(str(each["name"]) for each in contexts) or "none"
            raise HeteroInferError(
                f"--context: the kubeconfig has no context {context}. Choose one of its contexts: {known}",
                reason="NoContext",
            )
    namespace = active["context"].get("namespace")
    return None if namespace is None else str(namespace)
