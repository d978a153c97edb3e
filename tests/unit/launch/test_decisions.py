"""The check of a follower's identity, readiness, /proc/PID/stat, and descriptions of exits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.group_report import RankPhase, RankStatus
from tests.unit.launch.test_environment import FOLLOWER, LEADER, PLAN
from vllm_heteroinfer.launch.child_process import ProcessObservation, ProcessState, parse_stat
from vllm_heteroinfer.launch.readiness import GroupView
from vllm_heteroinfer.launch.supervised_process import describe_exit
from vllm_heteroinfer.launch.supervisor_messages import Hello, RankBeat, check_hello
from vllm_heteroinfer.pod.addresses import bind_host

HELLO = Hello(group_uid="u", epoch=1, plan_hash=PLAN.hash, pod=1)


@pytest.mark.parametrize(
    ("hello", "connected", "difference", "ends_group"),
    [
        (HELLO, {}, "", False),
        (replace(HELLO, group_uid="v"), {}, "group uid must be u (got v)", False),
        (replace(HELLO, epoch=0), {}, "epoch must be 1 (got 0)", False),
        (replace(HELLO, epoch=2), {}, "epoch must be 1 (got 2)", True),
        (replace(HELLO, plan_hash="0"), {}, f"plan must be {PLAN.hash} (got 0)", True),
        (replace(HELLO, pod=0), {}, "pod index must be 1 to 1 (got 0)", True),
        (replace(HELLO, pod=2), {}, "pod index must be 1 to 1 (got 2)", True),
        (HELLO, {1: "another"}, "pod 1 is already connected", False),
    ],
)
def test_the_leader_refuses_followers_of_other_groups(
    hello: Hello, connected: dict[int, str], difference: str, ends_group: bool
) -> None:
    assert check_hello(hello, plan=PLAN, launch=LEADER, connected=connected) == (difference, ends_group)


def beat(rank: int, pod: int, phase: RankPhase = RankPhase.READY) -> RankBeat:
    return RankBeat(status=RankStatus(rank=rank, pod=pod, phase=phase))


def loading(rank: int, pod: int, percent: int) -> RankBeat:
    status = RankStatus(
        rank=rank,
        pod=pod,
        phase=RankPhase.LOADING,
        loaded_bytes=percent * (1 + rank),
        total_bytes=100 * (1 + rank),
    )
    return RankBeat(status=status)


ALL = (beat(0, 0), beat(1, 0), beat(2, 1), beat(3, 1))


@pytest.mark.parametrize(
    ("view", "message", "pod", "rank"),
    [
        (GroupView(plan=PLAN, beats=ALL), "", None, None),
        (
            GroupView(plan=PLAN, beats=ALL, api_healthy=False),
            "waiting: vLLM's API server does not answer",
            0,
            None,
        ),
        (  # rank 1 is busy with the group's own first request; the API server listens only after this request
            GroupView(
                plan=PLAN,
                beats=(
                    ALL[0],
                    replace(ALL[1], busy="step 1", busy_s=9.0, waiting_for_rank=2),
                    replace(ALL[2], busy="step 1", busy_s=8.0),
                    ALL[3],
                ),
                api_healthy=False,
            ),
            "waiting: vLLM's API server does not answer, and rank 2 (pod 1) is busy",
            1,
            2,
        ),
        (
            GroupView(plan=PLAN, beats=(*ALL[:2], beat(2, 1, RankPhase.LOADING), ALL[3])),
            "waiting: rank 2 (pod 1) is Loading",
            1,
            2,
        ),
        (
            GroupView(
                plan=PLAN,
                beats=(
                    replace(beat(0, 0, RankPhase.CONNECTING), waiting_for_rank=2),
                    ALL[1],
                    replace(beat(2, 1, RankPhase.CONNECTING), waiting_for_rank=3),
                    beat(3, 1, RankPhase.CONNECTING),
                ),
            ),
            (
                "waiting: rank 0 (pod 0) is Connecting and waits for rank 2, rank 2 (pod 1) is Connecting "
                "and waits for rank 3, rank 3 (pod 1) is Connecting"
            ),
            1,
            3,
        ),
        (  # a rank that waits for a ready rank is as suspect as a rank that does not wait
            GroupView(
                plan=PLAN,
                beats=(
                    *ALL[:2],
                    replace(beat(2, 1, RankPhase.LOADING), waiting_for_rank=1),
                    beat(3, 1, RankPhase.WARMING_UP),
                ),
            ),
            "waiting: rank 2 (pod 1) is Loading and waits for rank 1, rank 3 (pod 1) is WarmingUp",
            1,
            2,
        ),
        (
            GroupView(plan=PLAN, beats=(loading(0, 0, 60), loading(1, 0, 100), loading(2, 1, 59), ALL[3])),
            "waiting: rank 0 (pod 0) is Loading, rank 1 (pod 0) is Loading, rank 2 (pod 1) is Loading",
            1,
            2,
        ),
        (
            GroupView(
                plan=PLAN,
                beats=(beat(0, 0, RankPhase.SLEEPING), ALL[1], beat(2, 1, RankPhase.SLEEPING), ALL[3]),
            ),
            "asleep: ranks 0, 2. To wake the group, send POST /wake_up to the API of the leader's pod",
            0,
            0,
        ),
        (
            GroupView(plan=PLAN, beats=(beat(0, 0, RankPhase.CONNECTING), ALL[1]), missing_pods=(1,)),
            "waiting: pod 1 has not connected, rank 0 (pod 0) is Connecting",
            1,
            None,
        ),
        (  # all unready ranks wait for the engine, which is in pod 0 and is not a rank
            GroupView(
                plan=PLAN,
                beats=(
                    ALL[0],
                    replace(beat(1, 0, RankPhase.LOADING), waiting_for_engine=True),
                    ALL[2],
                    replace(beat(3, 1, RankPhase.WARMING_UP), waiting_for_engine=True),
                ),
            ),
            (
                "waiting: rank 1 (pod 0) is Loading and waits for the engine, "
                "rank 3 (pod 1) is WarmingUp and waits for the engine"
            ),
            0,
            None,
        ),
        (  # the engine may itself wait for rank 3
            GroupView(
                plan=PLAN,
                beats=(
                    ALL[0],
                    replace(beat(1, 0, RankPhase.LOADING), waiting_for_engine=True),
                    ALL[2],
                    beat(3, 1, RankPhase.WARMING_UP),
                ),
            ),
            "waiting: rank 1 (pod 0) is Loading and waits for the engine, rank 3 (pod 1) is WarmingUp",
            1,
            3,
        ),
        (  # the last report of a silent rank is outdated
            GroupView(
                plan=PLAN,
                beats=(
                    beat(0, 0, RankPhase.CONNECTING),
                    ALL[1],
                    replace(beat(2, 1, RankPhase.LOADING), waiting_for_engine=True, silent_s=11.0),
                    ALL[3],
                ),
            ),
            (
                "waiting: rank 0 (pod 0) is Connecting, "
                "rank 2 (pod 1) is Loading and has sent its supervisor nothing for 11 s"
            ),
            1,
            2,
        ),
        (GroupView(plan=PLAN, beats=ALL[2:], only_pod=1), "", None, None),
        (
            GroupView(plan=PLAN, beats=ALL[2:3], only_pod=1),
            "waiting: rank 3 (pod 1) is Starting",
            1,
            3,
        ),
    ],
)
def test_a_group_is_ready_when_all_its_parts_are(
    view: GroupView, message: str, pod: int | None, rank: int | None
) -> None:
    assert (view.message, view.awaited_pod, view.awaited_rank) == (message, pod, rank)
    assert view.ready is not bool(message)


@st.composite
def waiting(draw: st.DrawFn) -> list[RankBeat]:
    """Draws beats of some ranks. Each rank waits for a rank, for a rank that does not exist, or for none."""
    ranks = draw(st.permutations(PLAN.ranks))[: draw(st.integers(0, len(PLAN.ranks)))]
    phases, awaited = st.sampled_from(list(RankPhase)), st.none() | st.integers(0, len(PLAN.ranks))
    return [
        replace(beat(rank.rank, rank.pod, draw(phases)), waiting_for_rank=draw(awaited)) for rank in ranks
    ]


@given(waiting(), st.sets(st.sampled_from([1])), st.sampled_from([None, 0, 1]))
def test_names_an_unready_rank_of_the_unready_pod(
    beats: list[RankBeat], missing: set[int], only: int | None
) -> None:
    view = GroupView(plan=PLAN, beats=tuple(beats), missing_pods=tuple(missing), only_pod=only)
    statuses = {status.rank: status for status in view.statuses()}
    if missing:
        assert (view.awaited_pod, view.awaited_rank) == (1, None)
    elif all(status.phase is RankPhase.READY for status in statuses.values()):
        assert (view.awaited_pod, view.awaited_rank, view.message) == (None, None, "")
    else:
        assert view.awaited_rank is not None
        assert statuses[view.awaited_rank].phase is not RankPhase.READY
        assert statuses[view.awaited_rank].pod == view.awaited_pod
        assert view.message


@given(st.permutations(range(4)), st.data())
def test_names_the_rank_that_all_others_wait_for(order: list[int], data: st.DataObject) -> None:
    hanging, *others = order
    phases = st.sampled_from([RankPhase.CONNECTING, RankPhase.LOADING, RankPhase.WARMING_UP])
    beats = [beat(hanging, PLAN.ranks[hanging].pod, data.draw(phases))]
    for number, rank in enumerate(others, start=1):  # each waits for an earlier rank of `order`
        awaited = data.draw(st.sampled_from(order[:number]))
        beats.append(replace(beat(rank, PLAN.ranks[rank].pod, data.draw(phases)), waiting_for_rank=awaited))
    assert GroupView(plan=PLAN, beats=tuple(beats)).awaited_rank == hanging


def test_status_has_every_rank() -> None:
    status = GroupView(plan=PLAN, beats=ALL[1:2], missing_pods=(1,)).build_report(FOLLOWER, "waiting")
    assert [(r.rank, r.pod) for r in status.ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [r.phase for r in status.ranks] == [RankPhase.STARTING, RankPhase.READY] + [RankPhase.STARTING] * 2


@pytest.mark.parametrize(
    ("state", "flags", "status", "seen"),
    [
        ("S", 0x400040, 0, ProcessObservation(state=ProcessState.RUNNING)),
        ("R", 0x400004, 9, ProcessObservation(state=ProcessState.ENDED, exit_code=-9)),
        ("D", 0x4, 3 << 8, ProcessObservation(state=ProcessState.ENDED, exit_code=3)),
        ("D", 0x4, 0, ProcessObservation(state=ProcessState.ENDED, exit_code=None)),
        ("Z", 0x400044, 0, ProcessObservation(state=ProcessState.ENDED, exit_code=None)),
        ("T", 0x400040, 19, ProcessObservation(state=ProcessState.STOPPED)),
        ("t", 0x400040, 5, ProcessObservation(state=ProcessState.STOPPED)),
    ],
)
def test_parses_the_stat_of_a_process_whose_name_has_parentheses(
    state: str, flags: int, status: int, seen: ProcessObservation
) -> None:
    # Field 3 is the state, 9 the flags, 52 the exit code (proc_pid_stat(5)).
    fields = [state, *["0"] * 5, str(flags), *["0"] * 42, str(status)]
    assert parse_stat(f"77 (a) S ((b) {' '.join(fields)}\n") == seen


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            -9,
            (
                "was killed by SIGKILL while Ready. If no user killed the process, memory was missing. Raise "
                "the memory limit of the pod's role, or free memory of the node"
            ),
        ),
        (-11, "was killed by SIGSEGV while Ready"),
        (-99, "was killed by signal 99 while Ready"),
        (
            0,
            (
                "exited with code 0 while Ready, although it must run as long as the group. Read the log of "
                "this process"
            ),
        ),
        (None, "ended while Ready (exit code unknown). Read the log of this process"),
    ],
)
def test_describes_each_exit_code_and_signal(code: int | None, words: str) -> None:
    assert describe_exit(code, RankPhase.READY) == words


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("localhost", "127.0.0.1"),
        ("10.0.0.7", None),
        ("llama-0-e1-p0.llama-0.ns.svc", None),
    ],
)
def test_chooses_the_address_to_listen_on(host: str, listens: str | None) -> None:
    assert bind_host(host) == listens
