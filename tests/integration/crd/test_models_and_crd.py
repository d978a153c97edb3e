"""Tests that the spec classes and the CRD accept and refuse the same resources, with a real API server.

The tests compare the whole spec and the name. The strategies leave out two differences:

- `metadata` besides the name (labels, finalizers, ...), apiVersion and kind belong to Kubernetes.
- For an integer, the spec classes refuse a whole number with a fraction (`maxModelLen: 8192.0`). The API
server
  refuses it only for fields that a CEL rule or /scale reads (seen with 1.35.4).
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from heteroinfer_operator.api import parse_resource, parse_spec, parse_status
from heteroinfer_operator.errors import SpecError
from tests.integration.crd.resource_requests import Refused, Server
from tests.integration.crd.strategies import changed, resources, statuses

# Without shrinking, because shrinking a failure would send thousands of requests.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
# All examples share the server on purpose: dry runs leave nothing on it.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


GOOD: dict[str, Any] = {
    "apiVersion": "heteroinfer.dev/v1alpha1",
    "kind": "HeteroInference",
    "metadata": {"name": "llama"},
    "spec": {"model": {"uri": "hf://org/model"}, "roles": [{"name": "cpu", "device": "CPU"}]},
}


def refusal_by_spec_classes(body: dict[str, Any]) -> str | None:
    """Returns the reason for which the spec classes refuse a resource, or None."""
    try:
        parse_resource(body)
    except SpecError as error:
        return error.message
    return None


def refusal_by_api_server(server: Server, body: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns the API server's reason to refuse a resource, or None and the object that it would store."""
    try:
        return None, server.create(body)
    except Refused as refused:
        return refused.message, {}


def agree(server: Server, body: dict[str, Any]) -> str:
    said_models = refusal_by_spec_classes(body)
    said_server, stored = refusal_by_api_server(server, body)
    note(f"models: {said_models}")
    note(f"server: {said_server}")
    assert (said_models is None) == (said_server is None)
    if said_models is not None:
        return "refused"
    # With defaults too: the stored resource must mean the same as the written one.
    assert parse_spec(stored["spec"]) == parse_spec(body["spec"])
    return "accepted"


def test_the_spec_classes_and_the_api_server_accept_valid_resources(server: Server) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=SHARED, phases=PHASES)
    @given(resources())
    def check(body: dict[str, Any]) -> None:
        seen[agree(server, body)] += 1

    check()
    assert seen["accepted"] > 50, seen


def test_the_spec_classes_and_the_api_server_agree_on_changed_resources(server: Server) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=600, deadline=None, suppress_health_check=SHARED, phases=PHASES)
    @given(changed())
    def check(body: dict[str, Any]) -> None:
        seen[agree(server, body)] += 1

    check()
    assert seen["accepted"] > 60, seen
    assert seen["refused"] > 200, seen


@pytest.mark.parametrize(
    "name", ["", "a", "a" * 40, "a" * 41, "a" * 254, "1a", "A", "a.b", "a-", "a_b", "a-1", None, 1]
)
def test_the_spec_classes_and_the_api_server_accept_the_same_names(name: Any, server: Server) -> None:
    body = {**GOOD, "metadata": {"name": name}}
    assert (refusal_by_spec_classes(body) is None) == (refusal_by_api_server(server, body)[0] is None)


def test_every_status_of_the_status_classes_is_stored_unchanged(server: Server) -> None:
    created = server.create({**GOOD, "metadata": {"name": "with-status"}}, dry_run=False)

    @settings(max_examples=100, deadline=None, suppress_health_check=SHARED, phases=PHASES)
    @given(statuses())
    def check(raw: dict[str, Any]) -> None:
        status = parse_status(raw)
        stored = server.put_status("with-status", {**created, "status": status.dump()})
        assert stored["status"] == status.dump()
        assert parse_status(stored["status"]) == status

    check()
