"""Describes how many pods of CPU nodes pay in mode FeedForward, for `heteroinfer plan --explain`. Pure."""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.commands.plan_choices import MIN_GAIN, plan_for, with_pods
from heteroinfer_operator.commands.plan_words import count, duration
from heteroinfer_operator.planning.planner import Planned
from heteroinfer_operator.planning.prediction import predict

_MAX_PODS: Final = 16
"""Numbers of pods above this one, and above the present one, are not predicted."""


def describe_pod_counts(planned: Planned) -> Iterator[str]:
    """Yields a line for each role of feed-forward ranks in pods of their own.

    The line has the step with the present number of pods, and with each number that gains at least MIN_GAIN
    over all smaller numbers. Some numbers gain nothing, because the ranks share a layer in whole units.
    """
    roles = [] if planned.remote is None else [each.role for each in planned.remote.sets if each.pods]
    for role in roles:
        steps = _predict_steps(planned, role)
        shown_pods: list[int] = []
        fastest_s = math.inf
        for pods, step_s in steps.items():
            pays = step_s <= (1 - MIN_GAIN) * fastest_s
            fastest_s = step_s if pays else fastest_s
            if pays or pods == role.pods:
                shown_pods.append(pods)
        shown_steps = {pods: steps[pods] for pods in shown_pods}
        yield _describe_steps(role, shown_steps, most_pods=max(steps), all_fit=len(steps) == max(steps))


def _predict_steps(planned: Planned, role: RoleSpec) -> dict[int, float]:
    """Returns the predicted step in seconds by the number of pods; numbers without a plan are missing."""
    steps: dict[int, float] = {}
    for pods in range(1, max(_MAX_PODS, role.pods) + 1):
        is_present = pods == role.pods
        other = planned if is_present else plan_for(planned, with_pods(planned.request.spec, role, pods))
        if other is not None:
            steps[pods] = predict(other.plan, other.rates).step_s
    return steps


def _describe_steps(role: RoleSpec, steps: Mapping[int, float], *, most_pods: int, all_fit: bool) -> str:
    """Returns the text about the steps by the number of pods.

    Args:
        most_pods: largest number of pods that was predicted.
        all_fit: whether every smaller number has a plan, too.
    """
    numbers = [
        f"{count(pods, 'pod')}{' (now)' if pods == role.pods else ''} {duration(step_s)}"
        for pods, step_s in steps.items()
    ]
    without_plan = "" if all_fit else ", or have no plan"
    return (
        f"a step with pods of role {role.name}: {', '.join(numbers)}. All other numbers up to {most_pods} "
        f"gain less than {MIN_GAIN * 100:.0f} % over fewer pods{without_plan}"
    )
