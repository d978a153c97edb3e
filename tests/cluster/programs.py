"""Records the programs of a cluster when they start, so that they can be ended and started again by name."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.cluster import processes
from tests.cluster.errors import ClusterError
from tests.cluster.processes import ProcessIdentity
from tests.cluster.state import State


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of the cluster with the folder `state`. `identity` is its present process."""

    state: State
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    identity: ProcessIdentity

    @classmethod
    def start(
        cls, state: State, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Self:
        """Starts the program, with its log in the state folder, and returns it.

        Raises:
            ClusterError: the program could not be started, or ended immediately.
        """
        environment = dict(environment or {})
        identity = processes.spawn(command, mark=state.folder, log=state.log(name), environment=environment)
        record = {"command": list(command), "environment": environment, **dataclasses.asdict(identity)}
        file = _file(state, name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(record))
        return cls(state=state, name=name, command=tuple(command), environment=environment, identity=identity)

    @classmethod
    def of(cls, state: State, name: str) -> Self:
        """Returns the program of this name as it was last started.

        Raises:
            ClusterError: the cluster has no program of this name.
        """
        try:
            record = json.loads(_file(state, name).read_text())
        except FileNotFoundError as error:
            known = sorted(file.stem for file in _file(state, name).parent.glob("*.json"))
            raise ClusterError(f"{state.name} has no program {name!r}. Its programs: {known}") from error
        return cls(
            state=state,
            name=name,
            command=tuple(record["command"]),
            environment=record["environment"],
            identity=ProcessIdentity(pid=record["pid"], started_ticks=record["started_ticks"]),
        )

    def kill(self) -> float:
        """Kills the program like a crash. Returns the Unix time just before.

        Raises:
            ClusterError: the program still runs after 10 s.
        """
        at = time.time()
        if self.identity.alive():
            processes.kill([self.identity.pid])
        processes.wait_until(f"the end of {self.name}", lambda: not self.identity.alive(), timeout_s=10)
        return at

    def start_again(self) -> Self:
        """Starts the program again with the same command, and returns it."""
        return type(self).start(self.state, self.name, self.command, self.environment)


def _file(state: State, name: str) -> Path:
    return state.folder / "programs" / f"{name}.json"
