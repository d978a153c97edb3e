"""Starts groups of real supervisors with small real ranks on loopback, and removes them completely."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_key import KEY_BYTES, GroupKey
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.plan import Device, EngineSettings, Mode, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from heteroinfer_contract.report_access import ReportReader
from tests.ports import free_ports

SUPERVISOR = "tests.integration.launch.tiny_supervisor"
REPOSITORY = Path(__file__).parents[3]
MARK = "TINY_MARK"
START_TIMEOUT_S = 60.0
KEY = GroupKey.of_group(b"o" * KEY_BYTES, "uid-1")


def pipeline_plan(ranks_by_pod: Sequence[int]) -> Plan:
    """Builds the plan of a pipeline of CPU ranks with one layer each."""
    pods = [pod for pod, count in enumerate(ranks_by_pod) for _ in range(count)]
    ranks = tuple(
        RankAssignment(
            rank=rank,
            local_rank=rank - pods.index(pod),
            pod=pod,
            role="cpu",
            device=Device.CPU,
            stage=rank,
            tensor_rank=0,
            first_layer=rank,
            end_layer=rank + 1,
            kv_cache_bytes=1 << 20,
        )
        for rank, pod in enumerate(pods)
    )
    engine = EngineSettings(
        model="/model",
        served_name="tiny",
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
    )
    return Plan(
        mode=Mode.PIPELINE,
        tensor_parallel_size=1,
        pipeline_parallel_size=len(ranks),
        ranks=ranks,
        engine=engine,
    )


def addresses(pods: int) -> tuple[PodAddress, ...]:
    """Returns an address on loopback for each pod. All ports differ."""
    fields = [f.name for f in dataclasses.fields(PodAddress) if f.name != "host"]
    ports = iter(free_ports(len(fields) * pods))
    return tuple(PodAddress(host="127.0.0.1", **{name: next(ports) for name in fields}) for _ in range(pods))


@dataclass
class Pod:
    """A running supervisor."""

    process: subprocess.Popen[bytes]
    address: PodAddress
    log: Path
    message: Path

    def failure(self) -> Failure:
        """Returns the pod's failure from its termination message."""
        failure = Failure.from_json(self.message.read_text())
        assert failure is not None, self.message.read_text()
        return failure

    def is_ready(self) -> bool:
        """Returns whether the pod reports that it is ready."""
        return self.get(names.PATH_READYZ)[0] == 200

    def is_alive(self) -> bool:
        """Returns whether the pod answers at all."""
        return self.get(names.PATH_HEALTHZ)[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        """Returns status and body of a path, and status 0 if no process listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.address.health_port}{path}", timeout=2) as r:
                return r.status, r.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""


@dataclass
class TinyGroup:
    """Supervisors of one group."""

    plan: Plan
    launches: list[PodLaunch]
    directory: Path
    env: dict[str, str]
    pods: list[Pod] = field(default_factory=list)

    def start_pod(
        self, index: int, launch: PodLaunch | None = None, plan: Plan | None = None, stdout: int | None = None
    ) -> Pod:
        """Starts the supervisor of a pod.

        Another `launch` or `plan` makes a pod that does not belong to the group. The output goes to a file,
        or to `stdout`, which has the meaning of subprocess.
        """
        launch = launch or self.launches[index]
        name = f"{index}-{len(self.pods)}"
        log, message = self.directory / f"{name}.log", self.directory / f"{name}.termination"
        env = {
            **os.environ,
            **(plan or self.plan).to_env(),
            **launch.to_env(),
            names.ENV_TERMINATION_MESSAGE_PATH: str(message),
            **self.env,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", SUPERVISOR],
                cwd=REPOSITORY,
                env=env,
                stdout=stdout or output,
                stderr=output,
            )
        pod = Pod(process, launch.address, log, message)
        self.pods.append(pod)
        return pod

    def start(self) -> None:
        """Starts every pod."""
        for index in range(len(self.plan.pods)):
            self.start_pod(index)

    def wait_ready(self) -> None:
        """Waits until every pod answers 200."""
        for pod in self.pods:
            wait_until(pod.is_ready, START_TIMEOUT_S, self.logs)

    def status(self) -> GroupReport:
        """Returns the leader's report of the group."""
        reader = ReportReader(KEY.of_epoch(self.launches[0].epoch) if self.env[names.ENV_GROUP_KEY] else None)
        url = f"http://127.0.0.1:{self.pods[0].address.health_port}{names.PATH_GROUP}"
        for _ in range(2):
            request = urllib.request.Request(url, headers=reader.request_headers())
            with urllib.request.urlopen(request, timeout=2) as answer:
                body = reader.read(answer.headers, answer.read().decode())
            if body is not None:
                return GroupReport.from_json(body)
        raise AssertionError("the leader does not accept the group's key")

    def rank_pid(self, rank: int) -> int:
        """Returns the process id of a rank."""
        return self.child_pid(f"rank {rank}", self.plan.ranks[rank].pod)

    def child_pid(self, label: str, pod: int) -> int:
        """Returns the process id of `rank N` or `api` from the supervisor's log."""
        found = re.search(rf"started {label} as process (\d+)", self.pods[pod].log.read_text())
        assert found is not None, self.logs()
        return int(found[1])

    def wait_exits(self, deadline: float) -> list[int]:
        """Waits until all supervisors have ended, and returns their exit codes.

        `deadline` is monotonic time.
        """
        codes = []
        for pod in self.pods:
            try:
                codes.append(pod.process.wait(max(0.01, deadline - time.monotonic())))
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"pod {self.pods.index(pod)} runs on\n{self.logs()}") from error
        return codes

    def marked(self) -> list[int]:
        """Returns the living processes of this group, with supervisors."""
        mark = f"{MARK}={self.env[MARK]}"
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and mark in environ(int(entry.name))
        ]

    def logs(self) -> str:
        """Returns all output, for the message of a failed test."""
        return "\n".join(f"--- {pod.log.name}\n{pod.log.read_text()[-4000:]}" for pod in self.pods)


def environ(pid: int) -> list[str]:
    """Returns the environment of a process, or nothing for a dead process."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = str) -> float:
    """Waits until `condition` holds, and returns the seconds. Fails after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"not within {timeout_s} s\n{explain()}")
        time.sleep(0.01)
    return time.monotonic() - start


@contextmanager
def tiny_group(
    directory: Path,
    ranks_by_pod: Sequence[int] = (1, 1),
    *,
    do: Mapping[int, str] | None = None,
    env: Mapping[str, str] | None = None,
    startup_timeout_s: float = 60.0,
    drain_timeout_s: float = 60.0,
    key: GroupKey | None = KEY,
) -> Iterator[TinyGroup]:
    """Yields a group that is not started yet, and kills its remaining processes at the end.

    Without a `key`, the group is like groups of versions that had no keys.
    """
    plan = pipeline_plan(ranks_by_pod)
    hosts = addresses(len(ranks_by_pod))
    launches = [
        PodLaunch(
            group="default/tiny/0",
            group_uid="uid-1",
            epoch=2,
            pod_index=index,
            addresses=hosts,
            startup_timeout_s=startup_timeout_s,
            drain_timeout_s=drain_timeout_s,
        )
        for index in range(len(ranks_by_pod))
    ]
    own = {
        MARK: uuid.uuid4().hex,
        "TINY_PORTS": json.dumps(free_ports(plan.world_size)),
        "TINY_DO": json.dumps({str(rank): what for rank, what in (do or {}).items()}),
        "TINY_TRIGGER": str(directory / "trigger"),
        names.ENV_GROUP_KEY: "" if key is None else key.text,
        **(env or {}),
    }
    group = TinyGroup(plan, launches, directory, own)
    try:
        yield group
    finally:
        for pid in group.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pod in group.pods:
            pod.process.wait(10)
