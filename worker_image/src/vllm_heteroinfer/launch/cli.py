"""`heteroinfer-worker`: the entry point of a worker pod. Stdlib and the contract only.

- `run` (the default) supervises the pod that the environment describes.
- `fetch` downloads a model from a hub into a cache. Only this command imports huggingface_hub.
- `inspect` reads a model's sizes.
- `calibrate` measures this machine.
- `network` measures the network between this machine and another.

All except `run` write their result as the pod's termination message.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from heteroinfer_contract import codec, names
from heteroinfer_contract.errors import ContractError, ModelIncompleteError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from heteroinfer_contract.group_key import GroupKey
from heteroinfer_contract.own_account import ensure_own_account
from heteroinfer_contract.parent_death import adopt_orphans
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import MAX_PORT, MAX_SECONDS, PodLaunch
from vllm_heteroinfer.launch.output import BackgroundHandler
from vllm_heteroinfer.launch.pod_processes import Commands
from vllm_heteroinfer.launch.supervisor import Supervisor, SupervisorSettings
from vllm_heteroinfer.pod import termination_message
from vllm_heteroinfer.pod.certificates import trust_ca_bundle

if TYPE_CHECKING:
    from heteroinfer_contract.model_profile import ModelProfile

LOG_FINISH_TIMEOUT_S = 1.0
_SCRATCH = Path(tempfile.gettempdir())
_HOW_TO_START = (
    "Start the pods of a group with the operator or `heteroinfer up`, which set plan and addresses"
)
MAX_OPEN_FILES = 65536
MEASURING_MODULES: Mapping[str, str] = MappingProxyType(
    {"calibrate": "vllm_heteroinfer.calibration", "network": "vllm_heteroinfer.calibration.network"}
)
"""Modules of the commands that measure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command (see `heteroinfer-worker --help`). Returns the exit code."""
    parser = _build_parser()
    # The commands that measure parse their own options, in the process that measures.
    arguments, other_options = parser.parse_known_args(argv)
    ensure_own_account()  # the cluster may have chosen a user id that the image has no account for
    if other_options and arguments.command not in MEASURING_MODULES:
        parser.error(f"unrecognized arguments: {' '.join(other_options)}")
    if arguments.command == "inspect":
        return inspect_model(arguments.model, arguments.termination_message_path, revision=arguments.revision)
    if arguments.command == "fetch":
        return _fetch(arguments)
    if arguments.command in MEASURING_MODULES:
        module = MEASURING_MODULES[arguments.command]
        _exec_measuring(module, arguments.termination_message_path, other_options)  # never returns
    return supervise(os.environ, Commands())


def _build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands, without the options of the commands that measure."""
    parser = argparse.ArgumentParser(prog="heteroinfer-worker", description="Entry point of a worker pod.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("run", help="supervise the ranks of the pod that the environment describes (default)")
    inspect = commands.add_parser("inspect", help="print a model's sizes, read from its own files")
    inspect.add_argument(
        "--model",
        required=True,
        help="directory of the model, or hf://ORG/MODEL, which is read without downloading the weights",
    )
    inspect.add_argument("--revision", default="main", help="branch, tag or commit in the hub")
    fetch = commands.add_parser(
        "fetch", help="download a model from a hub into a cache; HF_ENDPOINT is the hub's URL"
    )
    fetch.add_argument("--repository", required=True, metavar="ORG/MODEL")
    fetch.add_argument("--revision", default="main", help="branch, tag or commit; default: main")
    fetch.add_argument("--cache", type=Path, required=True, metavar="DIR", help="root of the cache")
    fetch.add_argument("--health-host", default="0.0.0.0", help="address for health checks")  # noqa: S104 - by the kubelet and the operator
    fetch.add_argument("--health-port", type=_port, default=names.DEFAULT_HEALTH_PORT)
    fetch.add_argument(
        "--patience",
        dest="stall_limit_s",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="fail if no new byte arrives for this time",
    )
    calibrate = commands.add_parser(
        "calibrate",
        add_help=False,
        help="measure the speed of this machine's memory, kernels and links; prints JSON within a minute",
    )
    network = commands.add_parser(
        "network",
        add_help=False,
        help="measure the network between this machine (--connect) and another (--listen); prints JSON",
    )
    for command in (inspect, fetch, calibrate, network):
        command.add_argument(
            "--termination-message-path",
            type=Path,
            default=_default_message_path(os.environ),
            help="file to which the result or the failure is written, in addition to the standard output; "
            f"default: the value of {names.ENV_TERMINATION_MESSAGE_PATH}, or "
            f"{names.TERMINATION_MESSAGE_PATH} in a pod",
        )
    return parser


def _port(text: str) -> int:
    """Parses a port; raises ArgumentTypeError."""
    if not text.isdecimal() or not 0 < int(text) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to {MAX_PORT} (got {text!r})")
    return int(text)


def _seconds(text: str) -> float:
    """Parses a positive number of seconds; raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0 and at most {MAX_SECONDS:.0f} (got {text!r})"
        )
    return seconds


def _fetch(arguments: argparse.Namespace) -> int:
    """Downloads the model that the arguments name. Returns the exit code."""
    _disable_hub_telemetry(os.environ)
    from vllm_heteroinfer.fetch.fetch_pod import fetch_model, read_cleanup, report_failure
    from vllm_heteroinfer.fetch.job import FetchOptions

    # The command line has an option for each field of FetchOptions except `cleanup`.
    options_given = {
        field.name: getattr(arguments, field.name)
        for field in fields(FetchOptions)
        if field.name != "cleanup"
    }
    options = FetchOptions(**options_given, cleanup=read_cleanup(os.environ))
    try:
        trust_ca_bundle(os.environ, _SCRATCH)  # before the hub's client is imported
    except ContractError as error:
        return report_failure(options, error)
    return fetch_model(options)


def _exec_measuring(module: str, message_path: Path | None, options: Sequence[str]) -> NoReturn:
    """Replaces this process with the program that measures. It may import torch, unlike a supervisor."""
    message = [] if message_path is None else ["--termination-message-path", str(message_path)]
    command = [sys.executable, "-m", module, *options, *message]
    # The kernel drops a SIGTERM for PID 1 while there is no handler. So block the signal until the new
    # program has set its handler and unblocks it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


def _disable_hub_telemetry(env: MutableMapping[str, str]) -> None:
    """Turns off telemetry of huggingface_hub, which reads the variable when it is imported."""
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def inspect_model(model: str, termination_message_path: Path | None, *, revision: str = "main") -> int:
    """Prints the profile of a model in a directory or on a hub. Returns the exit code.

    Also writes the profile, or a Failure, to `termination_message_path`.
    """
    try:
        text, code = _read_profile(model, revision).to_json(), names.EXIT_OK
        if termination_message_path is not None:
            _check_profile_length(text)
    except Exception as error:  # top-level boundary: the pod must report the reason of every failure
        message = f"the model cannot be read: {error!r}. Report this error, and name the model"
        if isinstance(error, ContractError):  # has a fix already
            message = str(error)
        failure = Failure(
            reason=FailureReason.MODEL_NOT_READABLE,
            message=message,
            exit_code=names.EXIT_USAGE,
            time=time.time(),
        )
        text, code = failure.to_json(), names.EXIT_USAGE
        print(f"heteroinfer-worker inspect: {message}", file=sys.stderr)  # noqa: T201 - a command prints
    else:
        print(text)  # noqa: T201 - a command prints
    if termination_message_path is not None:
        termination_message.write(termination_message_path, text)
    return code


def _check_profile_length(profile: str) -> None:
    """Raises ContractError if Kubernetes would cut the profile."""
    size = len(profile.encode())
    if size > MAX_TERMINATION_MESSAGE_BYTES:
        raise ContractError(
            f"the model's profile must have at most {MAX_TERMINATION_MESSAGE_BYTES} bytes, the limit of a "
            f"termination message in Kubernetes (got {size} bytes: too many layers differ in size). Use "
            "another model"
        )


def _read_profile(model: str, revision: str) -> "ModelProfile":
    """Reads the profile of a model in a directory, or on a hub for `hf://ORG/MODEL`."""
    # A supervisor must start fast, so only this command imports these modules.
    from heteroinfer_contract.model_fetch import HUB_SCHEME
    from heteroinfer_contract.model_files import read_profile

    if not model.startswith(HUB_SCHEME):
        return read_profile(Path(model))
    from vllm_heteroinfer.fetch.headers import LIMIT_S, read_hub_profile, time_limit
    from vllm_heteroinfer.fetch.hub_reader import HubReader

    with tempfile.TemporaryDirectory(prefix="heteroinfer-") as folder, time_limit(LIMIT_S):
        return read_hub_profile(HubReader(model.removeprefix(HUB_SCHEME), revision), Path(folder))


def _default_message_path(env: Mapping[str, str]) -> Path | None:
    """Returns the path of the termination message; None outside of a pod."""
    path = Path(env.get(names.ENV_TERMINATION_MESSAGE_PATH) or names.TERMINATION_MESSAGE_PATH)
    # The kubelet creates the file before the container starts. Without the file, no kubelet reads a message.
    return path if names.ENV_TERMINATION_MESSAGE_PATH in env or path.exists() else None


def supervise(env: MutableMapping[str, str], commands: Commands) -> int:
    """Runs the supervisor of the pod that `env` describes. Returns the exit code.

    Reports an invalid environment in the termination message, as the supervisor does for later failures.
    """
    handler = BackgroundHandler()
    _set_up_logging(handler, env)
    path = Path(env.get(names.ENV_TERMINATION_MESSAGE_PATH) or names.TERMINATION_MESSAGE_PATH)
    try:
        plan, launch = Plan.from_env(env), PodLaunch.from_env(env)
        trust_ca_bundle(env, _SCRATCH)
        step_timeout_s = _step_timeout_s(env)
        group_key = GroupKey.from_env(env)
        settings = SupervisorSettings(
            base_env=env,
            commands=commands,
            termination_message_path=path,
            step_timeout_s=step_timeout_s,
            key=None if group_key is None else group_key.of_epoch(launch.epoch),
        )
        _check_launch(plan, launch)
        if env.get(names.ENV_MODEL_FETCHED) == "1":  # the model comes from a cache, not from the user
            from heteroinfer_contract.model_cache import check_complete

            check_complete(Path(plan.engine.model))
    except ContractError as error:
        failure = _build_environment_failure(error, env)
        logging.getLogger(__name__).error("%s", error)
        termination_message.write(path, failure.to_json())
        code = names.EXIT_USAGE
    else:
        adopt_orphans()
        _raise_file_limit()
        code = asyncio.run(_run_supervisor(plan, launch, settings))
    handler.finish(LOG_FINISH_TIMEOUT_S)
    return code


def _build_environment_failure(error: ContractError, env: Mapping[str, str]) -> Failure:
    """Builds the failure of a supervisor that cannot start.

    Only an incomplete model is the fault of this pod. All pods of a group have the same settings, so invalid
    settings are not the fault of one pod.
    """
    incomplete = isinstance(error, ModelIncompleteError)
    return Failure(
        reason=FailureReason.MODEL_NOT_READABLE if incomplete else FailureReason.BAD_SETTINGS,
        message=str(error),
        pod=PodLaunch.from_env(env).pod_index if incomplete else None,
        time=time.time(),
    )


def _raise_file_limit() -> None:
    """Raises the limit of open files to the hard limit, at most MAX_OPEN_FILES.

    Clients with many connections could use up the soft limit, which is often 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


async def _run_supervisor(plan: Plan, launch: PodLaunch, settings: SupervisorSettings) -> int:
    return await Supervisor(plan, launch, settings).run()


def _check_launch(plan: Plan, launch: PodLaunch) -> None:
    """Checks that the launch is valid and fits the plan; raises ContractError."""
    launch.check()
    pods = len(plan.pods)
    if len(launch.addresses) != pods:
        raise ContractError(
            f"{names.ENV_ADDRESSES}: must have {pods} addresses, one for each pod of the plan (got "
            f"{len(launch.addresses)}). {_HOW_TO_START}"
        )
    if not 0 <= launch.pod_index < pods:
        raise ContractError(
            f"{names.ENV_POD_INDEX}: must be 0 to {pods - 1} (got {launch.pod_index}). {_HOW_TO_START}"
        )


def _step_timeout_s(env: Mapping[str, str]) -> float:
    """Returns the step time-out in seconds; raises ContractError if the variable is invalid."""
    text = env.get(names.ENV_STEP_TIMEOUT, str(names.DEFAULT_STEP_TIMEOUT_S))
    try:
        return _seconds(text)
    except argparse.ArgumentTypeError as error:
        raise ContractError(f"{names.ENV_STEP_TIMEOUT}: {error}. {codec.SAME_VERSION}") from error


def _set_up_logging(handler: logging.Handler, env: Mapping[str, str]) -> None:
    """Makes all log records go through `handler`, with the pod's index."""
    pod = env.get(names.ENV_POD_INDEX, "?")
    handler.setFormatter(logging.Formatter(f"[supervisor {pod}] %(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


if __name__ == "__main__":
    sys.exit(main())
