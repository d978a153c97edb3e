"""Tests a sample of the random resources of `make specs`, which checks 10,000."""

from tests.cluster.running_cluster import Cluster
from tests.integration.specs.checking import check_specs

COUNT = 300


def test_each_spec_is_refused_with_a_message_or_becomes_valid_objects(cluster: Cluster) -> None:
    result = check_specs(cluster, COUNT, number=20261121)
    assert not result.findings, "\n\n".join(result.findings[:5])
    assert result.counts["planned"] > COUNT / 10, result.line
    assert result.counts["refused"] > COUNT / 10, result.line
