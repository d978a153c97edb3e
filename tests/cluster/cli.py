"""Runs the command line of the test cluster: build, images, up, down, env, tested."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import images, tested, tools
from tests.cluster.errors import ClusterError
from tests.cluster.node import attach, start_node_cluster
from tests.cluster.progress import say
from tests.cluster.running_cluster import Cluster, ensure_tools, start_control_plane_only
from tests.cluster.state import State, all_states
from tests.cluster.volumes import volume_manifests


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, or 1 after printing the error to stderr."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.command == "tested":
            return _tested(record=chosen.record)
        _run(chosen)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the programs that tests need into the cache")
    build.add_argument("set", nargs="?", choices=tools.SETS, default="all", metavar="SET",
        help=f"{', '.join(tools.SETS)}; default: all")  # fmt: skip
    built = commands.add_parser("images", help="build the Dockerfile's images into the cache")
    built.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: {' '.join(images.TARGETS)}")
    built.add_argument("--load", action="store_true", help="also import them into the running node")
    up = commands.add_parser(
        "up", help="start a cluster that stays until `down` (if none runs), and print its lines for a shell"
    )
    up.add_argument("kind", choices=["control-plane", "node"])
    up.add_argument("--images", action="store_true", help="with the Dockerfile's images in the node")
    up.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="with this folder as claim `models` of namespace default",
    )
    down = commands.add_parser("down", help="stop clusters: those named, or all that `up` started")
    down.add_argument("names", nargs="*", metavar="NAME")
    passed = commands.add_parser("tested", help="fails unless this test cluster has passed its own tests")
    passed.add_argument("--record", action="store_true", help="record that it has just passed them")
    env = commands.add_parser("env", help="print the lines that make a shell use a running cluster")
    env.add_argument("name", nargs="?", metavar="NAME")
    return parser


def _run(chosen: argparse.Namespace) -> None:
    if chosen.command == "build":
        ensure_tools(tools.SETS[chosen.set])
    elif chosen.command == "images":
        _images(chosen.targets or images.TARGETS, chosen.load)
    elif chosen.command == "up":
        _up(chosen.kind, chosen.images, chosen.models)
    elif chosen.command == "down":
        _down(chosen.names)
    elif chosen.command == "env":
        _print_environment(Cluster(state=_named(chosen.name, "")))


def _tested(*, record: bool) -> int:
    """Records that the tests have passed, or reports whether they have. Returns the exit code."""
    if record:
        tested.record()
    elif not tested.is_tested():
        print("tests/cluster has changed, or was never tested here. Its own tests must run", file=sys.stderr)
        return 1
    print("tests/cluster is unchanged since it passed its own tests")
    return 0


def _images(targets: Sequence[str], load: bool) -> None:
    made = images.ensure_images(targets)
    if load:
        attach(_named(None, "node-")).load(made)
    for image in made:
        print(f"{image.reference} ({image.tag})")


def _up(kind: str, with_images: bool, models: Path | None) -> None:
    """Starts a cluster that stays, or prints the lines of one that runs already."""
    for state in all_states():
        if state.name.startswith(f"{kind}-") and not state.abandoned() and state.owner() is None:
            say(f"{state.name} runs already. `make cluster-down` stops it. Its lines:")
            _print_environment(Cluster(state=state))
            return
    ensure_tools(tools.NODE)
    if models is not None and kind != "node":
        raise ClusterError(
            "--models: a control plane has no node to mount a folder. Remove the option, or use `up node`"
        )
    if kind == "node":
        cluster: Cluster = start_node_cluster(images.ensure_images() if with_images else ())
    elif with_images:
        raise ClusterError(
            "--images: a control plane has no node for images. Remove the option, or use `up node`"
        )
    else:
        cluster = start_control_plane_only()
    if models is not None:
        cluster.kubectl("apply", "-f", "-", stdin=volume_manifests("default", models.resolve()))
    cluster.state.detach()
    _print_environment(cluster)


def _print_environment(cluster: Cluster) -> None:
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    folders = (tools.program_folder(tool) for tool in (tools.KUBERNETES, tools.HELM))
    print(f"export PATH={':'.join(map(str, folders))}:$PATH")


def _named(name: str | None, kind: str) -> State:
    running = [state for state in all_states() if state.name.startswith(kind)]
    found = [state for state in running if name in (None, state.name)]
    if len(found) != 1:
        names = ", ".join(state.name for state in running) or "none"
        raise ClusterError(f"got {name or 'no name'}, expected the name of one running cluster: {names}")
    return found[0]


def _down(names: Sequence[str]) -> None:
    for state in [_named(name, "") for name in names] or list(all_states()):
        owner = None if names or state.abandoned() else state.owner()
        if owner is not None:
            print(f"{state.name} belongs to a running test (pid {owner.pid}), so it keeps running")
            continue
        state.remove()
        print(f"{state.name} has been removed")
