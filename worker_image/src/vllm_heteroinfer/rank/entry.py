"""Entry point of a rank: `python -m vllm_heteroinfer.rank.entry`, started by a pod's supervisor.

At import this module needs only the standard library. It imports torch and vLLM after the environment is set.
"""

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.names import exit_code_of_signal
from heteroinfer_contract.plan import Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.group.deadline import NO_LIMIT_S, Deadline
from vllm_heteroinfer.pod.channel import RankReporter
from vllm_heteroinfer.pod.forking import run_or_fork
from vllm_heteroinfer.pod.lost_peer import PeerGoneError, find_lost_process
from vllm_heteroinfer.rank import imports
from vllm_heteroinfer.rank.preload import restart_with_preloaded_libraries

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_heteroinfer.group.fingerprint import Fingerprint
    from vllm_heteroinfer.group.rendezvous import GroupStore
    from vllm_heteroinfer.rank.step_metrics import RankMetrics

_logger = logging.getLogger(__name__)

_PEER_LOST_GRACE_S = 1.0
"""A rank that lost a peer waits for its supervisor to end it: the heartbeat time-out plus this time."""
_READERS_GRACE_S = 10.0
"""Time for other ranks to read all settings before rank 0, which serves the store, exits on a mismatch."""


def start() -> None:
    """Runs a rank of this pod.

    A CPU rank first restarts itself by exec, with libraries in LD_PRELOAD. The pod's first rank imports torch
    and vLLM. The pod's other processes are forked from this rank, and do not import them again. `main`
    reports an error of the imports, because it has the channel to the supervisor.
    """
    plan, _, rank = read_assignment(os.environ)
    restart_with_preloaded_libraries("vllm_heteroinfer.rank.entry", rank)
    import_error = imports.import_before_fork(plan, rank)
    run_or_fork(lambda: main(import_error), imports.adapt_forked_process)


def main(import_error: BaseException | None = None) -> NoReturn:
    """Runs a rank until its supervisor ends it, or until it fails.

    Args:
        import_error: an error of the imports, with which the rank fails immediately.
    """
    plan, launch, rank = read_assignment(os.environ)
    reporter = RankReporter.from_env(os.environ)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # A supervisor stops its pod by SIGTERM. A rank has nothing to save or clean up.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(exit_code_of_signal(signal.SIGTERM)))

    def fail(error: BaseException) -> NoReturn:
        """Reports an error and ends this process.

        If the end of another rank caused the error, first waits for the report about that rank.
        """
        traceback.print_exception(error)
        own_failure = build_failure(error, rank, starting=reporter.is_starting())
        lost = find_lost_process(error)
        if lost is not None:
            # The peer's supervisor reports the failed rank, and then our supervisor ends this process.
            time.sleep(launch.heartbeat_timeout_s + _PEER_LOST_GRACE_S)
        reporter.send_failure(own_failure, lost)
        _logger.error("rank %d failed, so its group ends: %s", rank.rank, error)
        os._exit(names.EXIT_RANK_FAILED)

    if import_error is not None:
        fail(import_error)
    try:
        run(plan, launch, rank, reporter, fail)
    except BaseException as error:
        fail(error)
    fail(
        PeerGoneError(
            None,
            "the engine or vLLM's API server has ended, so this rank gets no more calls. Read the log of "
            "pod 0",
        )
    )


def read_assignment(env: Mapping[str, str]) -> tuple[Plan, PodLaunch, RankAssignment]:
    """Reads plan, launch and rank from the environment; raises ContractError if a variable is invalid."""
    plan, launch = Plan.from_env(env), PodLaunch.from_env(env)
    text = env.get(names.ENV_RANK, "")
    if not text.isdecimal() or int(text) >= plan.world_size:
        raise ContractError(
            f"{names.ENV_RANK}: must be 0 to {plan.world_size - 1} (got {text!r}). Start the pod "
            "with `heteroinfer-worker`, which starts the ranks"
        )
    rank = plan.ranks[int(text)]
    if rank.pod != launch.pod_index:
        raise ContractError(
            f"{names.ENV_RANK}: must be a rank of this pod {launch.pod_index} (got {rank.rank}, a rank of "
            f"pod {rank.pod}). Start the pod with `heteroinfer-worker`, which starts the ranks"
        )
    return plan, launch, rank


def run(
    plan: Plan,
    launch: PodLaunch,
    rank: RankAssignment,
    reporter: RankReporter,
    fail: Callable[[BaseException], NoReturn],
) -> None:
    """Compares this rank's settings with other ranks, loads its part of the model, and serves calls.

    A feed-forward rank has no configuration of vLLM: it compares only the model's files, and answers asks
    until its group ends (`answering_rank.serve`).
    """
    from vllm_heteroinfer.group import reach
    from vllm_heteroinfer.group.rendezvous import GroupStore

    startup = Deadline.after(NO_LIMIT_S)
    step_timeout_s = float(os.environ.get(names.ENV_STEP_TIMEOUT, names.DEFAULT_STEP_TIMEOUT_S))
    metrics = _create_metrics(launch, rank, reporter, fail)
    # Rank 0 starts the store before it builds its configuration, because other ranks may connect earlier.
    store = GroupStore.host(launch, startup) if rank.rank == 0 else None
    config, own_settings = _build_settings(plan, launch, rank)
    reporter.set_phase(RankPhase.CONNECTING)
    store = store or GroupStore.connect(launch, startup)
    store.set_awaited_rank = reporter.set_awaited_rank
    if rank.feed_forward is not None:
        from vllm_heteroinfer.feed_forward import read_rate
        from vllm_heteroinfer.rank.worker.memory_policy import prefer_nodes_or_warn

        prefer_nodes_or_warn(memory_nodes(os.environ))  # before the measurement takes memory
        read_rate.publish_read_rate(plan, rank, store, startup)
    agree_on_settings(plan, rank, own_settings, store, startup)
    reach.check_pods(plan, launch, rank, store, startup)

    from vllm_heteroinfer.rank.context import RankContext

    context = RankContext(
        plan=plan,
        launch=launch,
        rank=rank,
        reporter=reporter,
        store=store,
        metrics=metrics,
        startup=startup,
        step_timeout_s=step_timeout_s,
        fail=fail,
        memory_nodes=memory_nodes(os.environ),
    )
    if config is None:  # a feed-forward rank
        from vllm_heteroinfer.rank.answering_rank import serve

        serve(context)  # never returns
    from vllm_heteroinfer.rank.rank_process import RankProcess

    RankProcess(config, context).worker_busy_loop()


def _create_metrics(
    launch: PodLaunch, rank: RankAssignment, reporter: RankReporter, fail: Callable[[BaseException], NoReturn]
) -> "RankMetrics":
    """Creates this rank's metrics, and serves them unless the user turned metrics off."""
    from vllm_heteroinfer.rank import step_metrics

    metrics = step_metrics.RankMetrics(rank, launch, reporter, writes_metrics=counts_metrics(os.environ))
    if metrics.writes_metrics:
        step_metrics.serve(
            metrics.registry,
            launch,
            rank,
            healthy=lambda: reporter.heartbeat_age_s() < launch.heartbeat_timeout_s,
            failed=fail,
        )
    return metrics


def _build_settings(
    plan: Plan, launch: PodLaunch, rank: RankAssignment
) -> "tuple[VllmConfig | None, Fingerprint]":
    """Builds vLLM's configuration of this rank, and the settings that must be equal on all ranks.

    A feed-forward rank has no configuration (None). Its settings are only the model's files.
    """
    from vllm_heteroinfer.group import fingerprint

    if rank.feed_forward is not None:
        return None, fingerprint.of_files(plan.engine.model)
    from vllm_heteroinfer.engine import arguments

    config = arguments.build_config(plan, launch, rank)
    return config, fingerprint.of_config(config, layer_partition=os.environ[names.ENV_LAYER_PARTITION])


def memory_nodes(env: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the NUMA nodes for this rank's memory; empty if the machine has only one node."""
    text = env.get(names.ENV_MEMORY_NODES, "")
    return tuple(int(node) for node in text.split(",")) if text else ()


def counts_metrics(env: Mapping[str, str]) -> bool:
    """Returns whether this rank collects and serves metrics.

    Raises:
        ContractError: the variable is neither `on` nor `off`.
    """
    word = env.get(names.ENV_METRICS, "on")
    if word not in {"on", "off"}:
        raise ContractError(f"{names.ENV_METRICS}: must be on or off (got {word!r}). Change engine.env")
    return word == "on"


def agree_on_settings(
    plan: Plan, rank: RankAssignment, own_settings: "Fingerprint", store: "GroupStore", startup: Deadline
) -> None:
    """Publishes this rank's settings, and compares them with the settings of all other ranks.

    Raises:
        ConfigMismatchError: settings differ. Every rank raises the same text.
        TimeoutError: a rank did not publish its settings in time.
    """
    from vllm_heteroinfer.group import fingerprint

    store.put(f"fingerprint/{rank.rank}", fingerprint.to_json(own_settings))
    fingerprints = [
        fingerprint.from_json(
            store.get(
                f"fingerprint/{each.rank}", startup, awaited=f"settings of rank {each.rank}", rank=each.rank
            )
        )
        for each in plan.ranks
    ]
    store.put(f"compared/{rank.rank}", "")
    try:
        fingerprint.compare(plan, fingerprints)
    except fingerprint.ConfigMismatchError:
        if rank.rank == 0:
            # This process serves the store. It must not exit before all ranks have read the settings.
            _wait_for_readers(plan, store)
        raise


def _wait_for_readers(plan: Plan, store: "GroupStore") -> None:
    """Waits until all other ranks have compared the settings, at most for the grace period."""
    grace = Deadline.after(_READERS_GRACE_S)
    for other in plan.ranks[1:]:
        try:
            store.get(
                f"compared/{other.rank}",
                grace,
                awaited=f'"settings compared" message from rank {other.rank}',
                rank=other.rank,
            )
        except TimeoutError as error:
            _logger.error("%s", error)


def build_failure(error: BaseException, rank: RankAssignment, *, starting: bool) -> Failure:
    """Returns the failure report for an error in a rank. It names the rank that caused the error.

    Args:
        starting: whether the rank was not ready yet, so that a time-out is a failed start.
    """
    from vllm_heteroinfer.feed_forward.lane_judge import LaneError, LaneFailedError
    from vllm_heteroinfer.group.fingerprint import ConfigMismatchError

    if isinstance(error, ConfigMismatchError):
        reason, culprit = FailureReason.CONFIG_MISMATCH, error.rank
    elif isinstance(error, LaneFailedError):
        reason, culprit = FailureReason.RANK_RAISED, error.rank
    elif isinstance(error, LaneError):
        reason, culprit = FailureReason.STEP_TIMEOUT, error.rank
    elif isinstance(error, ContractError):
        reason, culprit = FailureReason.BAD_SETTINGS, rank.rank
    elif isinstance(error, TimeoutError) and starting:
        reason, culprit = FailureReason.STARTUP_TIMEOUT, rank.rank
    else:
        reason, culprit = FailureReason.RANK_RAISED, rank.rank
    text = " ".join(str(error).split()) or type(error).__name__
    if reason is FailureReason.RANK_RAISED and culprit == rank.rank:  # an unexpected error
        text = f"{type(error).__name__}: {text}"
    return Failure(reason=reason, message=text, rank=culprit, time=time.time())


if __name__ == "__main__":
    start()
