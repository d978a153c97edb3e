"""Models and CRD accept and reject the same inputs, against a real API server.

Everything of the spec and the name is compared. By nature they can't agree in these, which
the strategies leave alone:
- `metadata` besides the name (labels, finalizers, ...), apiVersion and kind: Kubernetes' own;
- whole numbers with a fraction (`maxModelLen: 8192.0`): the models refuse them for integers; the
  API server does so only for fields that a rule or /scale reads (seen with 1.35.4).
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from heteroinfer_operator.api import parse_resource, parse_spec, parse_status
from heteroinfer_operator.errors import SpecError
from tests.integration.crd.resource_requests import Refused, Server
from tests.integration.crd.strategies import changed, resources, statuses

# Shrinking a failure would ask the server thousands of times: the example is shown as it was found.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
# The server is shared by all examples on purpose: nothing is kept in it (dry run).
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


GOOD: dict[str, Any] = {
    "apiVersion": "heteroinfer.dev/v1alpha1",
    "kind": "HeteroInference",
    "metadata": {"name": "llama"},
    "spec": {"model": {"uri": "hf://org/model"}, "roles": [{"name": "cpu", "device": "CPU"}]},
}


def by_models(body: dict[str, Any]) -> str | None:
    """Returns why the models refuse a resource, or None."""
    try:
        parse_resource(body)
    except SpecError as error:
        return error.message
    return None


def by_server(server: Server, body: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns why the API server refuses a resource, or None and what it would store."""
    try:
        return None, server.create(body)
    except Refused as refused:
        return refused.message, {}


def agree(server: Server, body: dict[str, Any]) -> str:
    said_models = by_models(body)
    said_server, stored = by_server(server, body)
    note(f"models: {said_models}")
    note(f"server: {said_server}")
    assert (said_models is None) == (said_server is None)
    if said_models is not None:
        return "refused"
    # Defaults too: what is stored means the same as what was written.
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
    assert (by_models(body) is None) == (by_server(server, body)[0] is None)


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
