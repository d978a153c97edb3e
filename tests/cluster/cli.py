"""The command line: build, images, up, down, env."""

import argparse
import sys
from collections.abc import Sequence

from tests.cluster import tools
from tests.cluster.cluster import Cluster, ensure_tools, start_control_plane_only
from tests.cluster.errors import ClusterError
from tests.cluster.node import start_node_cluster
from tests.cluster.state import State, all_states


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 1 with the reason on stderr."""
    chosen = _parser().parse_args(arguments)
    try:
        _run(chosen)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "build", help="compile the Kubernetes programs, etcd, Helm and CoreDNS into the cache"
    )
    up = commands.add_parser(
        "up", help="start a cluster that stays until `down`, and print its KUBECONFIG line"
    )
    up.add_argument("kind", choices=["control-plane", "node"])
    down = commands.add_parser("down", help="stop clusters: those named, or all that `up` started")
    down.add_argument("names", nargs="*", metavar="NAME")
    env = commands.add_parser("env", help="print the lines that make a shell use a running cluster")
    env.add_argument("name", nargs="?", metavar="NAME")
    return parser


def _run(chosen: argparse.Namespace) -> None:
    if chosen.command == "build":
        ensure_tools(tools.ALL)
    elif chosen.command == "up":
        cluster = start_node_cluster() if chosen.kind == "node" else start_control_plane_only()
        cluster.state.detach()
        _print_environment(cluster)
    elif chosen.command == "down":
        _down(chosen.names)
    elif chosen.command == "env":
        _print_environment(Cluster(state=_named(chosen.name)))


def _print_environment(cluster: Cluster) -> None:
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    programs = {tools.program_folder(tool) for tool in (tools.KUBERNETES, tools.HELM)}
    print(f"export PATH={':'.join(sorted(map(str, programs)))}:$PATH")


def _named(name: str | None) -> State:
    running = list(all_states())
    found = [state for state in running if name in (None, state.name)]
    if len(found) != 1:
        names = ", ".join(state.name for state in running) or "none"
        raise ClusterError(f"which cluster? Running: {names}")
    return found[0]


def _down(names: Sequence[str]) -> None:
    for state in [_named(name) for name in names] or list(all_states()):
        if not names and not state.abandoned() and state.owner() is not None:
            print(f"{state.name} belongs to a running test: left alone")
            continue
        state.remove()
        print(f"{state.name} is gone")
