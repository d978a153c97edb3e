"""Runs the row of the matrix in which a stranger attacks a group's ports, and must not learn its secrets."""

import base64
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from heteroinfer_contract import codec, names
from heteroinfer_contract.group_key import GroupKey
from tests.cluster import processes
from tests.e2e.faults.measuring import keep
from tests.e2e.faults.scene import Scene
from vllm_heteroinfer.launch.handshake import build_opening
from vllm_heteroinfer.launch.supervisor_messages import Hello, Message

OURS = (
    names.DEFAULT_CONTROL_PORT,
    names.DEFAULT_HEALTH_PORT,
    names.DEFAULT_EXECUTOR_PORT,
    names.DEFAULT_METRICS_PORT,
)
"""Ports of our own programs, without those of vLLM and torch."""
VISIT_S = 240.0


@contextlib.contextmanager
def visit(scene: Scene) -> Iterator[float]:
    """Attacks all ports of both pods from the node itself, which no NetworkPolicy stops."""
    at = time.time()
    pods = scene.pair.pods()
    order = {
        "pods": [pod["status"]["podIP"] for pod in pods],
        "forged": [base64.b64encode(text).decode() for text in forge(scene, pods)],
    }
    script = [sys.executable, "-B", str(Path(__file__).with_name("stranger.py"))]
    command = [*scene.cluster.namespaces.prefix, *script]
    with ThreadPoolExecutor(1) as executor:
        visiting = executor.submit(processes.run, command, stdin=json.dumps(order), timeout_s=VISIT_S)
        try:
            while not visiting.done():
                scene.check_answer()
        except OSError as error:
            raise AssertionError(f"the model did not answer during the attack: {scene.group}") from error
        report = json.loads(visiting.result())
    keep("stranger.json", json.dumps(report, indent=1))
    check_learnt(report, secrets_of(pods))
    yield at


def forge(scene: Scene, pods: Sequence[dict[str, Any]]) -> list[bytes]:
    """Returns hellos of a stranger who knows all that the API server shows of the group, but no key."""
    labels = pods[1]["metadata"]["labels"]
    uid = scene.pair.get(names.SINGULAR, scene.pair.name)["metadata"]["uid"]
    epoch = int(labels[names.LABEL_EPOCH])
    hello = Hello(group_uid=uid, epoch=epoch, plan_hash=labels[names.LABEL_PLAN], pod=1)
    stranger = GroupKey.of_group(b"s" * 32, uid).of_epoch(epoch)
    lines = codec.to_json(Message(hello=hello)), codec.to_json(build_opening(stranger, 1))
    return [line.encode() + b"\n" for line in lines]


def secrets_of(pods: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the values that our ports must not reveal: the plan's hash, the epoch, the resource's uid."""
    metadata = pods[0]["metadata"]
    (owner,) = metadata["ownerReferences"]
    return [metadata["labels"][names.LABEL_PLAN], metadata["labels"][names.LABEL_EPOCH], owner["uid"]]


def check_learnt(report: dict[str, Any], secrets: Sequence[str]) -> None:
    """Checks that our own ports reveal nothing to scans, forged hellos, a recorded hello, and requests."""
    leader, follower = report["open"].values()
    assert set(OURS) <= set(leader), leader
    assert names.DEFAULT_HEALTH_PORT in follower, follower
    assert names.DEFAULT_CONTROL_PORT not in follower, follower
    recorded = base64.b64decode(report["recorded"])
    assert recorded.count(b"\n") >= 2, f"expected a recorded hello and one more line, got {recorded!r}"
    for answer in report["answers"]:
        got = base64.b64decode(answer["got"]).decode(errors="replace")
        if answer["port"] not in OURS:
            continue
        assert not [secret for secret in secrets if secret in got], (answer, got)
        if answer["port"] == names.DEFAULT_CONTROL_PORT and got:
            # Only the recorded hello has a code made with the key. The only answer is a new challenge.
            assert set(json.loads(got)) == {"code", "nonce"}, (answer, got)
            assert recorded.startswith(answer["said"].encode()), answer
