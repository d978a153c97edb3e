"""A rank holds back an error that only says that a peer is gone, by the supervisors' own words."""

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import FailureReason
from tests.unit.launch.test_environment import PLAN
from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.launch.culprit import is_communication_error
from vllm_heteroinfer.rank.entry import failure, is_peer_lost


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerLostError(1, 2.0, "no sign of it"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), True),
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
            True,
        ),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError("got memory for 1.0 MiB of KV cache"), False),
        (RuntimeError("ProcessGroupGloo: rank 1 is gone"), True),
        (FileNotFoundError(2, "No such file or directory", "/home/me/igloo/model.safetensors"), False),
        (ValueError("model.layers.3.mlp.gloobal_scale: broken pipeline of scales"), False),
    ],
)
def test_rank_and_supervisor_know_a_lost_peer_by_the_same_words(error: Exception, lost: bool) -> None:
    seen = failure(error, PLAN.ranks[0], starting=True)
    assert (is_peer_lost(seen), is_communication_error(seen)) == (lost, lost)


def test_wrong_settings_are_reported_at_once_though_they_name_gloo() -> None:
    error = ContractError("got HETEROINFER_BRIDGE='tcp', expected auto, shared_memory or gloo")
    seen = failure(error, PLAN.ranks[0], starting=True)
    assert (is_peer_lost(seen), is_communication_error(seen)) == (False, False)


@pytest.mark.parametrize(
    ("starting", "reason"), [(True, FailureReason.STARTUP_TIMEOUT), (False, FailureReason.RANK_RAISED)]
)
def test_a_timeout_while_serving_is_not_one_of_the_start(starting: bool, reason: FailureReason) -> None:
    seen = failure(TimeoutError("rank 1 sent nothing"), PLAN.ranks[0], starting=starting)
    assert (seen.reason, "rank 1 sent nothing" in seen.message) == (reason, True)
