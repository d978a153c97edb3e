"""`heteroinfer-worker calibrate`: runs each measurement as a process of its own.

Stdlib and the contract only.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

from heteroinfer_contract import codec, names, parent_death
from heteroinfer_contract.calibration import ALL_NODES, MAX_ENTRIES, MAX_TEXT, Calibration, Versions
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from vllm_heteroinfer.calibration import hardware
from vllm_heteroinfer.calibration.process_output import BEGUN, ProcessOutput
from vllm_heteroinfer.launch.child_process import child_pids
from vllm_heteroinfer.launch.cpu_allocation import Cpu
from vllm_heteroinfer.launch.host import LOOPBACK_INTERFACE
from vllm_heteroinfer.pod import termination_message

LIMIT_S: Final = 55.0
"""Time for all measurements. The calibration lists unfinished measurements as skipped."""
_RAISE_LIMIT: Final = (
    "Measure again while the machine does nothing else, or raise calibration.limitSeconds (chart) or --limit "
    "(heteroinfer-worker calibrate)"
)
_MODULE: Final = __name__.rpartition(".")[0]
_MAX_NODES: Final = 8
"""Maximum number of NUMA nodes that are also measured separately: the first nodes."""
_NODE_POINTS: Final = 3
"""Number of thread counts measured for a single NUMA node."""
_LAST_BEGIN_SHARE: Final = 0.9
"""Part of the remaining time in which a command of several measurements may begin a measurement. In the rest
of the time, the last measurement can end."""
_SHORTEST_S: Final = 1.0
"""If less time is left, no measurement begins."""
_POLL_S: Final = 0.05
"""Longest wait for output before the next check whether a process has ended."""
_KILL_POLL_S: Final = 0.01
"""Wait between two attempts to end the remaining children."""
_LAST_READ_S: Final = 0.5
"""Time to read the rest of an ended process's output. Its children can keep the pipe open."""
_KILL_S: Final = 2.0
"""Time to end the remaining children of a measuring process."""
_VALUES: Final = ("name", "operations_per_s")
"""Fields of results that have a single value for the machine."""
_LISTS: Final = ("readings", "kernels", "transfers", "hops", "skipped")
"""Kinds of results of which a machine has several."""


@dataclass(slots=True)
class MeasuredResults:
    """The reports of all measuring processes.

    Attributes:
        begun: names of the measurements that a command of several measurements has begun, in order.
    """

    lists: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in _LISTS})
    values: dict[str, Any] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)

    def store_line(self, line: str) -> None:
        """Stores the result that a line of a measuring process contains. Ignores other lines, which are logs.

        Also ignores a damaged line: another process may have written into the middle of the line. Keeps at
        most MAX_ENTRIES results of each list.
        """
        if not line.startswith('{"kind": "'):
            return
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            return
        kind = result.pop("kind")
        if kind in self.lists:
            if len(self.lists[kind]) < MAX_ENTRIES:
                self.lists[kind].append(result)
        elif kind == BEGUN:
            name = str(result.get("what"))
            if name not in self.begun and len(self.begun) < MAX_ENTRIES:
                self.begun.append(name)
        elif kind == "gpu":
            self.values["gpu"] = result
        else:  # the name of the GPU, or the operations per second
            self.values |= {name: result[name] for name in _VALUES if name in result}

    def skip(self, name: str, reason: str) -> None:
        """Stores the name of a failed measurement, and the reason."""
        self.lists["skipped"].append({"what": name, "why": reason})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measuring process, or two that measure together.

    Attributes:
        what: name of the measurement.
        commands: modules below this package, each with its arguments.
        cpus: ids of the CPUs that the processes may use; all if empty.
        env: environment variables for the processes.
        runs_several: whether the command runs several measurements, and reports the start of each. Such a
            command gets further arguments: its time in seconds, and the measurements to leave out. So if a
            measurement crashes the process, the command can run again without this measurement.
    """

    what: str
    commands: tuple[tuple[str, ...], ...]
    cpus: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    runs_several: bool = False


def plan_measurements(cpus: tuple[Cpu, ...], folder: Path) -> list[Measurement]:
    """Lists the measurements of this machine. Measurements that most plans need come first.

    Args:
        cpus: one CPU of each core.
        folder: empty folder for the file through which the two ranks of a hop connect.
    """
    all_cpus = tuple(cpu.id for cpu in cpus)
    hop_file = str(folder / "hops")
    return [
        *_memory_measurements(cpus),
        Measurement(
            what="hops",
            commands=tuple(("hops", str(rank), hop_file) for rank in range(2)),
            # Without this variable, gloo would look up the machine's own name, which may have no address.
            env={**_cpu_environment(), names.ENV_GLOO_INTERFACE: LOOPBACK_INTERFACE},
        ),
        Measurement(what="GPU", commands=(("gpu",),)),
        Measurement(
            what="kernels",
            commands=(("kernel_reading", str(len(all_cpus))),),
            cpus=all_cpus,
            env=_cpu_environment(),
            runs_several=True,
        ),
    ]


def _memory_measurements(cpus: tuple[Cpu, ...]) -> Iterator[Measurement]:
    """Yields the measurements of memory: all NUMA nodes together, then each node if there are several."""
    all_cpus = tuple(cpu.id for cpu in cpus)
    yield Measurement(
        what="memory, all NUMA nodes",
        commands=(_reading_arguments(len(all_cpus), ALL_NODES),),
        cpus=all_cpus,
        env=_cpu_environment(),
    )
    by_node: dict[int, list[int]] = {}
    for cpu in cpus:
        by_node.setdefault(cpu.node, []).append(cpu.id)
    if len(by_node) == 1:
        return
    for node, ids in sorted(by_node.items())[:_MAX_NODES]:
        yield Measurement(
            what=f"memory, NUMA node {node}",
            commands=(_reading_arguments(len(ids), node, most=_NODE_POINTS),),
            cpus=tuple(ids),
            env=_cpu_environment(),
        )


def _reading_arguments(cores: int, node: int, *, most: int = MAX_ENTRIES) -> tuple[str, ...]:
    """Returns the command that measures memory with `cores` threads, with half of `cores`, and so on.

    The numbers of threads ascend in the command.

    Args:
        node: number of the NUMA node, or ALL_NODES.
        most: maximum number of thread counts.
    """
    counts = [cores]
    while counts[-1] > 1 and len(counts) < most:
        counts.append(max(counts[-1] // 2, 1))
    return ("memory_reading", ",".join(map(str, reversed(counts))), str(node))


def _cpu_environment() -> dict[str, str]:
    """Returns the variables for a process that uses only CPUs."""
    return {
        names.ENV_VISIBLE_GPUS: names.HIDE_GPUS,
        # Without this variable and without a plan, vLLM would choose CUDA in the image for GPUs.
        names.ENV_TARGET_DEVICE: "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def measure(measurements: Iterable[Measurement], limit_s: float) -> MeasuredResults:
    """Runs measurements one after another. After `limit_s` seconds, ends the running measurement.

    Stores a measurement that failed or did not begin in time as skipped.
    """
    results, deadline = MeasuredResults(), time.monotonic() + limit_s
    for measurement in measurements:
        left_s = deadline - time.monotonic()
        if left_s >= _SHORTEST_S:
            _run_until_done(measurement, deadline, left_s, results)
        else:
            results.skip(measurement.what, f"not begun within {limit_s:.0f} s. {_RAISE_LIMIT}")
    return results


def _run_until_done(
    measurement: Measurement, deadline: float, left_s: float, results: MeasuredResults
) -> None:
    """Runs a measurement, and runs it again after a crash if its command runs several measurements.

    A further run leaves out the measurements that have begun. There is no further run if the last run has
    begun no measurement, because a further run would crash in the same way.

    Args:
        deadline: time (time.monotonic()) at which the measurement must end.
        left_s: seconds until the deadline.
    """
    while left_s >= _SHORTEST_S:
        begun_before = len(results.begun)
        failed = _run_measurement(measurement, left_s, results)
        if failed is None:
            return
        results.skip(failed.name, failed.reason)
        has_begun_one = len(results.begun) > begun_before
        if not measurement.runs_several or not has_begun_one:
            return
        left_s = deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class _FailedMeasurement:
    """A measurement that failed, and the reason."""

    name: str
    reason: str


def _run_measurement(
    measurement: Measurement, limit_s: float, results: MeasuredResults
) -> _FailedMeasurement | None:
    """Runs the processes of a measurement, and stores their results. Returns the failed measurement, or None.

    Kills the processes and their children at the limit.
    """
    begun_before = tuple(results.begun)
    # A command of several measurements gets the seconds in which it may begin measurements, and the names of
    # the measurements that it leaves out.
    extra_arguments = (
        (f"{limit_s * _LAST_BEGIN_SHARE:.1f}", *begun_before) if measurement.runs_several else ()
    )
    processes: list[subprocess.Popen[bytes]] = []
    # For each process, a list with the last line of its errors; empty if it has written no errors.
    tails: list[list[str]] = [[] for _ in measurement.commands]
    children_to_keep = set(child_pids())  # all later children belong to this measurement
    with contextlib.ExitStack() as at_end:
        at_end.callback(_end_processes, processes, children_to_keep)  # also runs if SIGTERM ends this process
        processes.extend(
            _start_process(measurement, (*command, *extra_arguments)) for command in measurement.commands
        )
        output = at_end.enter_context(ProcessOutput(_pipes_and_readers(processes, results, tails)))
        is_late = not _wait_until_ended(processes, output, limit_s)
        _end_processes(processes, children_to_keep)
        output.read_rest(_LAST_READ_S)
    # `results.begun` has grown while the output was read. If a measurement failed, it is the last one.
    has_begun_one = len(results.begun) > len(begun_before)
    name = results.begun[-1] if has_begun_one else measurement.what
    if is_late:
        return _FailedMeasurement(name, f"not done within {limit_s:.0f} s. {_RAISE_LIMIT}")
    reason = _find_reason([process.returncode for process in processes], tails)
    return None if reason is None else _FailedMeasurement(name, reason)


def _find_reason(exit_codes: Sequence[int], tails: Sequence[Sequence[str]]) -> str | None:
    """Returns why processes failed; None if no process failed.

    The reason has the exit code of the first failed process, and the first error of all failed processes.

    Args:
        exit_codes: exit code of each process.
        tails: last line of each process's errors, in a list; an empty list if there are no errors.
    """
    failed_codes = [code for code in exit_codes if code]
    if not failed_codes:
        return None
    last_lines = [tail[-1] for tail, code in zip(tails, exit_codes, strict=True) if code and tail]
    return f"ended with exit code {failed_codes[0]}: {last_lines[0] if last_lines else ''}"


def _pipes_and_readers(
    processes: Sequence["subprocess.Popen[bytes]"], results: MeasuredResults, tails: Sequence[list[str]]
) -> Iterator[tuple[IO[bytes], Callable[[str], None]]]:
    """Yields the pipes of processes, each with the function that receives its lines."""
    for process, tail in zip(processes, tails, strict=True):
        assert process.stdout is not None
        assert process.stderr is not None
        yield process.stdout, results.store_line
        yield process.stderr, functools.partial(_keep_last_line, tail)


def _wait_until_ended(
    processes: Sequence["subprocess.Popen[bytes]"], output: ProcessOutput, limit_s: float
) -> bool:
    """Reads the output of processes until all have ended. Returns whether they ended within the limit."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        output.read(min(left_s, _POLL_S))
    return True


def _end_processes(processes: Sequence["subprocess.Popen[bytes]"], children_to_keep: Set[int]) -> None:
    """Ends measuring processes and all their children, even children in other sessions.

    Args:
        children_to_keep: process IDs of children of this process that must not end.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + _KILL_S
    # If a child of a measuring process outlives its parent, this process has adopted the child
    # (`adopt_orphans`).
    while (remaining := set(child_pids()) - children_to_keep) and time.monotonic() < deadline:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the child has ended
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_KILL_POLL_S)


def _start_process(measurement: Measurement, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Starts a measuring process, which dies with this process, on the CPUs of the measurement."""
    # With a plan in its environment, the process would count as a rank.
    env = {name: value for name, value in os.environ.items() if name != names.ENV_PLAN}
    threads = {names.ENV_OMP_THREADS: str(len(measurement.cpus))} if measurement.cpus else {}
    # Sets the CPUs before the module is imported, because the module's libraries start threads at the import.
    code = f"import os, sys; from {parent_death.__name__} import die_with_parent; "
    code += f"die_with_parent({os.getpid()}); "
    if measurement.cpus:
        code += f"os.sched_setaffinity(0, {set(measurement.cpus)}); "
    code += f"os.execv(sys.executable, [sys.executable, '-m', '{_MODULE}.{command[0]}', *sys.argv[1:]])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *command[1:]],
        env={**env, **measurement.env, **threads},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _keep_last_line(tail: list[str], line: str) -> None:
    """Replaces the content of the list `tail` by a line, unless the line is blank."""
    if line.strip():
        tail[:] = [line.strip()]


def build_calibration(
    results: MeasuredResults, versions: Versions, *, started: float, duration_s: float
) -> Calibration:
    """Builds the calibration from the results.

    Args:
        started: time of the start, in seconds since 1970.
        duration_s: time that all measurements took.

    Raises:
        ContractError: no memory measurement succeeded. The message contains the reasons.
    """
    skipped = [
        {"what": each["what"][:MAX_TEXT], "why": each["why"][: 2 * MAX_TEXT]}
        for each in results.lists["skipped"][-MAX_ENTRIES:]
    ]
    if not results.lists["readings"]:
        reasons = "; ".join(f"{each['what']}: {each['why']}" for each in skipped)
        raise ContractError(
            f"the memory speed was not measured: {reasons}. Remove the cause, and run `heteroinfer-worker "
            "calibrate` again. The measurement needs torch and an idle machine"
        )
    cpuinfo = Path("/proc/cpuinfo").read_text()
    machine = hardware.observe_hardware(
        cpuinfo, hardware.usable_cpus(), hardware.usable_cores(), results.values.get("name", "")
    )
    raw = {
        **results.lists,
        "hardware": asdict(machine),
        "versions": asdict(versions),
        "time": round(started, 1),
        "duration_s": round(duration_s, 1),
        "skipped": skipped,
        "operations_per_s": results.values.get("operations_per_s", 0.0),
    }
    if "gpu" in results.values:
        raw["gpu"] = results.values["gpu"]
    calibration = codec.from_mapping(Calibration, raw)
    calibration.check()
    return calibration


def fit_text(calibration: Calibration) -> str:
    """Returns the calibration as JSON, shortened if it would not fit into a termination message.

    First shortens the reasons of skipped measurements. Then drops the rates for several rows of the kernel
    that was measured last, of the kernel before it, and so on. If even the shortest text does not fit,
    returns the shortest text.
    """
    shorter = [
        replace(
            calibration, skipped=tuple(replace(each, why=each.why[:length]) for each in calibration.skipped)
        )
        for length in (2 * MAX_TEXT, 80, 30, 0)  # the first length cuts nothing
    ]
    kernels = calibration.kernels
    for count in range(len(kernels) - 1, -1, -1):
        one_row_only = tuple(replace(kernel, more_rows=()) for kernel in kernels[count:])
        shorter.append(replace(shorter[-1], kernels=(*kernels[:count], *one_row_only)))
    texts = (each.to_json() for each in shorter)
    fitting = (text for text in texts if len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES)
    return next(fitting, shorter[-1].to_json())


def calibrate(output: Path | None, message_path: Path | None, *, limit_s: float = LIMIT_S) -> int:
    """Measures this machine and prints the calibration. Returns the exit code.

    Args:
        output: file for the calibration; standard output if None.
        message_path: file of the pod's termination message, or None. Receives the calibration, or a Failure.
    """
    started, begin = time.time(), time.monotonic()
    try:
        cpus = hardware.usable_cores()
        with tempfile.TemporaryDirectory(prefix="heteroinfer-") as folder:
            results = measure(plan_measurements(cpus, Path(folder)), limit_s)
        calibration = build_calibration(
            results, hardware.observe_versions(), started=started, duration_s=time.monotonic() - begin
        )
        text, code = fit_text(calibration), names.EXIT_OK
        if output is None:
            sys.stdout.write(text + "\n")
        else:
            output.write_text(text + "\n")
    except (ContractError, OSError) as error:
        failure = Failure(
            reason=FailureReason.BAD_SETTINGS,
            message=str(error),
            exit_code=names.EXIT_USAGE,
            time=time.time(),
        )
        text, code = failure.to_json(), names.EXIT_USAGE
        sys.stderr.write(f"heteroinfer-worker calibrate: {error}\n")
    if message_path is not None:
        termination_message.write(message_path, text)
    return code
