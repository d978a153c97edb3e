"""Runs several checks and combines their errors, so that users see all problems at the same time. Pure."""

from collections.abc import Callable

from heteroinfer_operator.errors import PlanError


def run_all_checks(*checks: Callable[[], tuple[str, ...] | None]) -> tuple[str, ...]:
    """Runs all checks, also after a failed one, and returns their warnings.

    Raises:
        PlanError: at least one check failed. The message has the lines of all failed checks, so that users
            can fix all problems at the same time.
    """
    warnings: list[str] = []
    failed: list[PlanError] = []
    for check in checks:
        try:
            warnings += check() or ()
        except PlanError as error:
            failed.append(error)
    if failed:
        lines = dict.fromkeys(line for error in failed for line in error.message.splitlines())
        raise PlanError("\n".join(lines), reason=failed[0].reason)
    return tuple(warnings)
