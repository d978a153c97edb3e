"""The verdict on a soak finds what is wrong, and only that."""

from collections import Counter

import pytest

from heteroinfer_contract import names
from tests.soak.chaos import REAL_RANK_KILLED
from tests.soak.observing import Sample, growth_mib, mixed_epochs
from tests.soak.report import build_table, find_faults
from tests.soak.soak import Result


def samples(*rss_mib: float) -> list[Sample]:
    return [Sample(at_s=float(at), rss_mib=rss, files=20) for at, rss in enumerate(rss_mib)]


@pytest.fixture
def good() -> Result:
    objects = Counter(Pod=6, Service=6)
    result = Result(seconds=60.0, resources=3, before=objects, after=Counter(objects), settled_s=2.0)
    result.samples = samples(*[70.0] * 4, *[90.0] * 12)
    return result


def test_a_good_soak_has_a_table_and_no_fault(good: Result) -> None:
    assert find_faults(good, has_real_ranks=False) == []
    table = build_table(good)
    assert "| all Ready again | after 2 s |" in table
    assert "| growth from the second quarter to the last | +0.0 MiB |" in table


def test_each_fault_is_reported(good: Result) -> None:
    good.not_ready = ["soak-1: Waiting: group 0"]
    good.mixed = ["soak-2/0: epochs ['1', '2']"]
    good.after["Pod"] += 1
    good.left = Counter(ConfigMap=1)
    good.errors = ["reconcile failed; this is a defect of the operator"]
    good.samples = samples(*[70.0] * 8, *[90.0] * 8)
    words = ("not Ready", "two epochs", "objects: got", "left after", "log: reconcile failed", "grew by 20.0")
    found = find_faults(good, has_real_ranks=False)
    assert len(found) == len(words)
    assert all(expected in fault for expected, fault in zip(words, found, strict=True))


def test_too_few_samples_prove_nothing(good: Result) -> None:
    good.samples = good.samples[:15]
    assert find_faults(good, has_real_ranks=False) == ["got 15 samples, expected at least 16: make it longer"]


def test_a_soak_with_real_ranks_must_kill_one(good: Result) -> None:
    assert find_faults(good, has_real_ranks=True) == [
        "no real rank was killed, expected some: none was found on the node"
    ]
    good.done[REAL_RANK_KILLED] += 1
    assert find_faults(good, has_real_ranks=True) == []


def test_growth_leaves_the_first_quarter_out() -> None:
    assert growth_mib(samples(10.0, 50.0, 50.0, 50.0, 51.0, 51.0, 52.0, 52.0)) == 2.0


def test_groups_with_pods_of_two_epochs_are_found() -> None:
    def pod(resource: str, group: str, epoch: str) -> dict[str, object]:
        return {"metadata": {"name": f"{resource}-{group}-{epoch}-0", "labels": {names.LABEL_GROUP: "?"}}}

    pods = [pod("a", "0", "1"), pod("a", "0", "2"), pod("a", "1", "3"), pod("b", "0", "1")]
    assert mixed_epochs(pods) == ["a/0: epochs ['1', '2']"]
