"""`heteroinfer suspend`: stops all groups of a resource and keeps its number of replicas."""

import argparse
import asyncio

from heteroinfer_operator.commands.spec_patch import Spec, add_target_options, patch_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer suspend`."""
    add_target_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sets `spec.suspend` to true; returns 0.

    Raises:
        HeteroInferError: no resource is chosen or found, or the user lacks the right to patch it.
    """
    asyncio.run(patch_specs(arguments, _suspend))
    return 0


def _suspend(spec: Spec) -> tuple[Spec, str]:
    return ({"suspend": True}, "suspended") if not spec.get("suspend") else ({}, "was suspended already")
