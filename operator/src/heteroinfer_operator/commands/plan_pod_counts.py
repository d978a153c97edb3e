"""Describes how many pods of CPU nodes pay in mode FeedForward, for `heteroinfer plan --explain`. Pure."""

from collections.abc import Iterator
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

    The line has the step with each number of pods, up to the first number that gains less than MIN_GAIN over
    the number before. It has at least the present number and, if that one pays, the next.
    """
    roles = [] if planned.remote is None else [each.role for each in planned.remote.sets if each.pods]
    for role in roles:
        steps = _predict_steps(planned, role)
        if steps:
            yield _describe_steps(role, steps)


def _predict_steps(planned: Planned, role: RoleSpec) -> dict[int, float]:
    """Returns the predicted step in seconds by the number of pods; numbers without a plan are missing."""
    spec, steps = planned.request.spec, dict[int, float]()
    for pods in range(1, max(_MAX_PODS, role.pods) + 1):
        other = planned if pods == role.pods else plan_for(planned, with_pods(spec, role, pods))
        if other is None:
            if steps and pods > role.pods:  # larger numbers have no plan, either
                break
            continue
        steps[pods] = predict(other.plan, other.rates).step_s
        if pods >= role.pods and not _pays(steps, pods):
            break
    return steps


def _pays(steps: dict[int, float], pods: int) -> bool:
    """Reports whether the last pod of a number gains at least MIN_GAIN; True if one pod fewer has no plan."""
    return pods - 1 not in steps or steps[pods] <= (1 - MIN_GAIN) * steps[pods - 1]


def _describe_steps(role: RoleSpec, steps: dict[int, float]) -> str:
    """Returns the steps by number of pods, and the largest number whose last pod pays."""
    numbers = [
        f"{count(pods, 'pod')}{' (now)' if pods == role.pods else ''}: {duration(step_s)}"
        for pods, step_s in steps.items()
    ]
    paying_pods = min(steps)
    while paying_pods + 1 in steps and _pays(steps, paying_pods + 1):
        paying_pods += 1
    if paying_pods == max(steps):
        limit = f"More than {count(paying_pods, 'pod')} were not predicted"
    else:
        limit = f"More than {count(paying_pods, 'pod')} gain less than {MIN_GAIN:.0%} each"
    return f"a step by the number of pods of role {role.name}: {', '.join(numbers)}. {limit}"
