"""Starts a whole group as processes of this machine, and stops it completely.

Only this module knows how a group's processes are started; see `start_group`.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.plan import Device, EngineSettings, Mode, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.cluster_epoch import EPOCH
from tests.ports import contiguous_ports, free_ports
from vllm_heteroinfer.launch.environment import rank_environment
from vllm_heteroinfer.launch.host import observe_host
from vllm_heteroinfer.pod.addresses import host_in_url
from vllm_heteroinfer.pod.channel import RankChannel

REPOSITORY = Path(__file__).parents[3]
READY_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0
"""Seconds of silence. A step takes 0.1 s on a busy machine, and answers have hundreds of tokens."""
KV_CACHE_BYTES = 64 << 20


def _worker_python() -> Path:
    named = os.environ.get("HETEROINFER_TEST_PYTHON")
    if named:
        return Path(named)
    has_vllm = importlib.util.find_spec("vllm") is not None
    return Path(sys.executable) if has_vllm else REPOSITORY / ".venv-worker/bin/python"


WORKER_PYTHON = _worker_python()
"""Python that runs the pods: HETEROINFER_TEST_PYTHON, else this Python if it has vLLM, else .venv-
worker's."""


def build_plan(
    model: Path,
    *,
    layers: Sequence[int],
    pods: Sequence[int],
    tensor: int = 1,
    mode: Mode = Mode.PIPELINE,
    devices: Sequence[Device] | None = None,
    **engine: Any,
) -> Plan:
    """Builds a plan with these ranks.

    Args:
        model: folder of the model.
        layers: number of layers of each stage.
        pods: number of ranks of each pod.
        tensor: number of ranks of each stage.
        mode: pipeline or tensor.
        devices: device of each pod; CPUs by default.
        **engine: fields of EngineSettings to change.
    """
    ranks = []
    devices = devices or [Device.CPU] * len(pods)
    pod_of = [pod for pod, count in enumerate(pods) for _ in range(count)]
    for rank, pod in enumerate(pod_of):
        stage = rank // tensor
        first = sum(layers[:stage])
        ranks.append(
            RankAssignment(
                rank=rank,
                local_rank=rank - pod_of.index(pod),
                pod=pod,
                role=f"role-{pod}",
                device=devices[pod],
                stage=stage,
                tensor_rank=rank % tensor,
                first_layer=first,
                end_layer=first + layers[stage],
                kv_cache_bytes=KV_CACHE_BYTES,
            )
        )
    settings: dict[str, Any] = {
        "model": str(model),
        "served_name": "tiny",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
        "block_size": 32,
    }
    return Plan(
        mode=mode,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=len(layers),
        ranks=tuple(ranks),
        engine=EngineSettings(**{**settings, **engine}),
    )


def build_addresses(plan: Plan) -> tuple[PodAddress, ...]:
    """Returns loopback addresses for every pod. All ports differ."""
    addresses = []
    for pod in plan.pods:
        ports = free_ports(6)
        metrics = contiguous_ports(len(pod.ranks))
        addresses.append(
            PodAddress(
                host="127.0.0.1",
                api_port=ports[0],
                health_port=ports[1],
                control_port=ports[2],
                rendezvous_port=ports[3],
                executor_port=ports[4],
                metrics_port=metrics,
            )
        )
    return tuple(addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One started process: a pod's supervisor, or a rank without a supervisor."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def ended(self) -> bool:
        return self.process.poll() is not None


class Group:
    """A running group. Use it through `start_group`.

    Attributes:
        scratch: the pods' folder for temporary files.
    """

    def __init__(
        self, plan: Plan, addresses: tuple[PodAddress, ...], log_dir: Path, scratch: Path | None = None
    ) -> None:
        self.plan = plan
        self.addresses = addresses
        self.log_dir = log_dir
        self.scratch = scratch or log_dir
        self.children: list[Child] = []

    @property
    def url(self) -> str:
        return f"http://{host_in_url(self.addresses[0].host)}:{self.addresses[0].api_port}"

    def health_url(self, path: str, pod: int = 0) -> str:
        """Returns the URL of a path of a pod's supervisor."""
        address = self.addresses[pod]
        return f"http://{host_in_url(address.host)}:{address.health_port}{path}"

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Waits until the group would answer a request, and returns the seconds. Raises if a pod ends."""
        start = time.monotonic()
        url = self.health_url(names.PATH_READYZ)
        while time.monotonic() - start < timeout_s:
            for child in self.children:
                if child.ended():
                    raise AssertionError(f"{child.name} exited {child.process.returncode}:\n{self.logs()}")
            if fetch(url) is not None:
                self._check_warnings()
                return time.monotonic() - start
            time.sleep(0.1)
        raise AssertionError(f"not ready within {timeout_s} s:\n{self.logs()}")

    def _check_warnings(self) -> None:
        """Fails if vLLM has warned about a variable that the supervisor sets."""
        for child in self.children:
            assert "Unknown vLLM environment variable" not in child.log.read_text(), self.logs()

    def status(self) -> GroupReport:
        """Returns the leader's report of the group."""
        text = fetch(self.health_url(names.PATH_GROUP))
        assert text is not None, self.logs()
        return GroupReport.from_json(text)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def complete(self, prompt_token_ids: Sequence[int], max_tokens: int = 32, **options: Any) -> list[int]:
        """Returns the greedy tokens after a prompt."""
        token_ids: list[int] = self.choice(prompt_token_ids, max_tokens=max_tokens, **options)["token_ids"]
        return token_ids

    def choice(self, prompt_token_ids: Sequence[int], **options: Any) -> Any:
        """Returns the API's answer to a prompt.

        It is greedy unless `options` of the request say otherwise.
        """
        body = {
            "model": self.plan.engine.served_name,
            "prompt": list(prompt_token_ids),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.post("/v1/completions", {**body, **options})["choices"][0]

    def rank_pid(self, rank: int) -> int:
        """Returns the process id of a rank, from its supervisor's log."""
        child = self.children[self.plan.ranks[rank].pod]
        started = re.search(rf"started rank {rank} as process (\d+)", child.log.read_text())
        assert started is not None, self.logs()
        return int(started[1])

    def metrics_url(self, rank: int) -> str:
        assignment = self.plan.ranks[rank]
        address = self.addresses[assignment.pod]
        return f"http://{host_in_url(address.host)}:{address.metrics_port + assignment.local_rank}"

    def failure(self, pod: int) -> Failure | None:
        """Returns the failure that a pod's supervisor left."""
        path = self.log_dir / f"termination-{pod}"
        return Failure.from_json(path.read_text()) if path.exists() else None

    def logs(self) -> str:
        return "\n".join(f"--- {m.name}\n{m.log.read_text(errors='replace')[-6000:]}" for m in self.children)

    def terminate(self) -> None:
        """Sends SIGTERM to every pod."""
        for child in self.children:
            child.process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float = 30.0) -> None:
        self.terminate()
        for child in self.children:
            try:
                child.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait(timeout_s)
                raise AssertionError(f"{child.name} did not stop within {timeout_s} s") from None


def fetch(url: str, timeout_s: float = 5.0) -> str | None:
    """Returns the answer of a URL, or None if the status is not 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return bytes(answer.read()).decode()
    except (urllib.error.URLError, OSError):
        return None


@contextlib.contextmanager
def start_group(
    plan: Plan,
    log_dir: Path,
    *,
    addresses: tuple[PodAddress, ...] | None = None,
    env: Mapping[str, str] | None = None,
    pod_env: Mapping[int, Mapping[str, str]] | None = None,
    directories: Mapping[int, Path] | None = None,
    wrappers: Mapping[int, Sequence[str]] | None = None,
    startup_timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[Group]:
    """Starts every pod of a group, each with its supervisor. Stops them all at the end.

    Args:
        plan: plan of the group.
        log_dir: folder for the output of each pod, and its termination message.
        addresses: addresses of the pods; unused ones by default.
        env: variables that are added to every pod's environment.
        pod_env: variables of some pods, by index. They override `env`.
        directories: working directories of some pods, by index.
        wrappers: commands before the command of some pods, by index. They must become that command
            (exec).
        startup_timeout_s: start-up timeout in the pods' launch.
    """
    launch = _launch(plan, log_dir, addresses, startup_timeout_s)
    # Short, because vLLM's sockets are in it, and the path of a socket has at most 107 bytes.
    scratch = tempfile.TemporaryDirectory(prefix="hi-")
    group = Group(plan, launch.addresses, log_dir, Path(scratch.name))
    try:
        for pod in plan.pods:
            environment = {
                **os.environ,
                "TMPDIR": scratch.name,
                **plan.to_env(),
                **replace(launch, pod_index=pod.index).to_env(),
                names.ENV_TERMINATION_MESSAGE_PATH: str(log_dir / f"termination-{pod.index}"),
                **(env or {}),
                **(pod_env or {}).get(pod.index, {}),
            }
            wrapper = (wrappers or {}).get(pod.index, ())
            command = [*wrapper, str(WORKER_PYTHON), "-m", "vllm_heteroinfer.launch.cli", "run"]
            where = (directories or {}).get(pod.index, log_dir)
            group.children.append(_start(f"pod-{pod.index}", command, environment, log_dir, cwd=where))
        yield group
    finally:
        group.stop()
        scratch.cleanup()


@contextlib.contextmanager
def start_ranks(plans: Mapping[int, Plan], log_dir: Path, *, startup_timeout_s: float) -> Iterator[Group]:
    """Starts the ranks of a group without supervisors, so that pods with different plans meet.

    Supervisors would refuse each other first, because the plans have different hashes.

    Args:
        plans: plan of each pod. All plans have the same ranks.
        log_dir: folder for the output of each rank.
        startup_timeout_s: start-up timeout in the pods' launch.
    """
    launch = _launch(plans[0], log_dir, None, startup_timeout_s)
    group = Group(plans[0], launch.addresses, log_dir)
    channels = []
    try:
        for rank in plans[0].ranks:
            own = replace(launch, pod_index=rank.pod)
            base = {**os.environ, **plans[rank.pod].to_env(), **own.to_env()}
            channel, theirs = RankChannel.open_pair()
            channels.append(channel)
            host = observe_host(own, "127.0.0.1")
            environment = rank_environment(plans[rank.pod], own, plans[rank.pod].ranks[rank.rank], base, host)
            environment[names.ENV_RANK_CHANNEL_FD] = str(theirs.fileno())
            command = [str(WORKER_PYTHON), "-m", "vllm_heteroinfer.rank.entry"]
            group.children.append(
                _start(f"rank-{rank.rank}", command, environment, log_dir, cwd=log_dir, fds=[theirs.fileno()])
            )
            theirs.close()
        yield group
    finally:
        group.stop()
        for channel in channels:
            channel.close()


def _launch(
    plan: Plan, log_dir: Path, addresses: tuple[PodAddress, ...] | None, startup_timeout_s: float
) -> PodLaunch:
    """Returns the launch of a group's first pod."""
    log_dir.mkdir(parents=True, exist_ok=True)
    return PodLaunch(
        group="test/tiny/0",
        group_uid=log_dir.name,
        epoch=EPOCH,
        pod_index=0,
        addresses=addresses or build_addresses(plan),
        startup_timeout_s=startup_timeout_s,
    )


def _start(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    log_dir: Path,
    *,
    cwd: Path,
    fds: Sequence[int] = (),
) -> Child:
    """Starts a process with its output in a log file."""
    log = log_dir / f"{name}.log"
    env = {**env, "PYTHONPATH": _absolute(env.get("PYTHONPATH", ""))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
        )
    return Child(name=name, process=process, log=log)


def _absolute(paths: str) -> str:
    """Returns the folders of a PYTHONPATH as absolute paths, because pods run in other directories."""
    return os.pathsep.join(str(Path(path).absolute()) for path in paths.split(os.pathsep) if path)
