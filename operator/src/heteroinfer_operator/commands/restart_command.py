"""`heteroinfer restart`: starts all groups of a resource again."""

import argparse
import asyncio
from datetime import UTC, datetime

from heteroinfer_operator.commands.spec_patch import Spec, add_target_options, patch_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer restart`."""
    add_target_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sets `spec.restartedAt` to now; returns 0.

    Raises:
        HeteroInferError: no resource is chosen or found, or the user lacks the right to patch it.
    """
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"

    def restart(spec: Spec) -> tuple[Spec, str]:
        """Returns the field to set, and a text about the outcome for the user."""
        when = " (suspended: takes effect when you resume the resource)" if spec.get("suspend") else ""
        return {"restartedAt": now}, f"restart requested{when}"

    asyncio.run(patch_specs(arguments, restart))
    return 0
