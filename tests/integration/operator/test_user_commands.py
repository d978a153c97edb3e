"""Commands of users against a real API server, with resources that no operator has acted on."""

import yaml

from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.command_line import heteroinfer, reported
from tests.integration.operator.running_operator import create_resource


async def test_top_names_what_no_operator_has_acted_on(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    await create_resource(server, namespace)
    shown = reported(control_plane.kubeconfig, "top", "-n", namespace, "--once")
    assert shown == (
        f"{namespace}/tiny: no operator has acted on it yet. `heteroinfer check` finds out why\n"
    )


async def test_a_selector_and_a_context_choose_resources(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    await create_resource(server, namespace, "one")
    await create_resource(server, namespace, "two")
    await server.merge(HETERO_INFERENCE.path(namespace, "two"), {"metadata": {"labels": {"team": "search"}}})
    options = ("-n", namespace, "-l", "team=search", "-o", "yaml")
    (context,) = (each["name"] for each in yaml.safe_load(control_plane.kubeconfig.read_text())["contexts"])
    shown = yaml.safe_load(reported(control_plane.kubeconfig, "top", *options, "--context", context))
    assert [each["name"] for each in shown["resources"]] == ["two"]
    code, _, errors = heteroinfer(control_plane.kubeconfig, "top", "-l", "not a selector!")
    assert code == 1
    assert "unable to parse requirement" in errors
