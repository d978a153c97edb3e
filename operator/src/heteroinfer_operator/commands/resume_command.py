"""`heteroinfer resume`: starts the groups of a suspended resource."""

import argparse
import asyncio

from heteroinfer_operator.commands.spec_patch import Spec, add_target_options, patch_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer resume`."""
    add_target_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sets `spec.suspend` to false; returns 0.

    Raises:
        HeteroInferError: no resource is chosen or found, or the user lacks the right to patch it.
    """
    asyncio.run(patch_specs(arguments, _resume))
    return 0


def _resume(spec: Spec) -> tuple[Spec, str]:
    return ({"suspend": False}, "resumed") if spec.get("suspend") else ({}, "was not suspended")
