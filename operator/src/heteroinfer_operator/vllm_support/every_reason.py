"""Runs checks so that users see every reason at once. Pure."""

from collections.abc import Callable

from heteroinfer_operator.errors import PlanError


def every_reason(*checks: Callable[[], tuple[str, ...] | None]) -> tuple[str, ...]:
    """Runs all checks and returns their warnings.

    Raises:
        PlanError: at least one check failed. The message has a line for each, so that users fix all at once.
    """
    warnings: list[str] = []
    errors: list[PlanError] = []
    for check in checks:
        try:
            warnings += check() or ()
        except PlanError as error:
            errors.append(error)
    if errors:
        lines = dict.fromkeys(line for error in errors for line in error.message.splitlines())
        raise PlanError("\n".join(lines), reason=errors[0].reason)
    return tuple(warnings)
