"""Manages the state folder of a running cluster: its owner, its changes of the machine, and how to undo them.

Every change outside the folder is written to a journal before it is made (write-ahead). So if the starter of
the cluster fails or is killed, the next `up` or `down` finds the folder and undoes everything.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from tests.cluster import cluster_cgroup, processes
from tests.cluster.errors import ClusterError
from tests.cluster.folders import locked, state_root
from tests.cluster.processes import ProcessIdentity


def _undo_link(name: str) -> None:
    if Path(f"/sys/class/net/{name}").exists():
        processes.run(["ip", "link", "delete", name])


def _undo_blackhole(destination: str) -> None:
    if processes.run(["ip", "route", "show", "type", "blackhole", "exact", destination]).strip():
        processes.run(["ip", "route", "delete", "blackhole", destination])


UNDO: dict[str, Callable[[str], None]] = {
    "cgroup": cluster_cgroup.remove,
    "link": _undo_link,
    "blackhole": _undo_blackhole,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One cluster's folder. `name` is its kind and number: control-plane-0, and so on."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def number(self) -> int:
        """Distinguishes clusters of one kind on one machine, from 0 on. Addresses and links depend on it."""
        return int(self.name.rpartition("-")[2])

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "admin.kubeconfig"

    def log(self, program: str) -> Path:
        """Returns the log file of a program of this cluster."""
        return self.folder / "log" / f"{program}.log"

    @classmethod
    def claim(cls, kind: str, limit: int) -> Self:
        """Creates the folder of a new cluster, owned by this process. First removes clusters of dead owners.

        Raises:
            ClusterError: `limit` clusters of this kind run already.
        """
        with locked(state_root() / ".lock"):
            for left in all_states():
                if left.abandoned():
                    left.remove()
            for number in range(limit):
                state = cls(folder=state_root() / f"{kind}-{number}")
                if not state.folder.exists():
                    state.folder.mkdir(mode=0o700)
                    state._write_owner(ProcessIdentity.of(os.getpid()))
                    return state
        raise ClusterError(
            f"{limit} clusters of kind {kind} run already. Stop one with `python -m tests.cluster down`"
        )

    def _write_owner(self, owner: ProcessIdentity | None) -> None:
        draft = self.folder / "owner.draft"
        draft.write_text(json.dumps(None if owner is None else dataclasses.asdict(owner)))
        draft.rename(self.folder / "owner.json")

    def owner(self) -> ProcessIdentity | None:
        """Returns the process whose end also ends this cluster, or None: it stays until `down`."""
        owner = json.loads((self.folder / "owner.json").read_text())
        return None if owner is None else ProcessIdentity(**owner)

    def abandoned(self) -> bool:
        """Returns whether the owner has died without stopping its cluster."""
        try:
            owner = self.owner()
        except FileNotFoundError:  # the owner died between creating the folder and writing its own identity
            return True
        return owner is not None and not owner.alive()

    def detach(self) -> None:
        """Makes the cluster independent of this process: it runs until `down`."""
        self._write_owner(None)

    def will_change(self, kind: str, subject: str) -> None:
        """Records a change before it is made. `kind` is a key of UNDO."""
        with (self.folder / "journal").open("a") as journal:
            journal.write(f"{kind} {subject}\n")

    def remove(self) -> None:
        """Ends every program of the cluster, and undoes every change. May be called again.

        Raises:
            ClusterError: a change could not be undone. The folder stays, so that the call can be
                repeated.
        """
        processes.stop_marked(self.folder)
        journal = self.folder / "journal"
        if journal.exists():
            for line in reversed(journal.read_text().splitlines()):
                kind, _, subject = line.partition(" ")
                UNDO[kind](subject)
        # Programs that a container left outside every cgroup would keep files here open, so none may be left.
        processes.stop_marked(self.folder)
        shutil.rmtree(self.folder)


def all_states() -> Iterator[State]:
    """Yields every cluster with a folder on this machine, running or left over."""
    for folder in sorted(state_root().iterdir()):
        if folder.is_dir():
            yield State(folder=folder)
