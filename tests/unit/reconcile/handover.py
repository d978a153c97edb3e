"""Resources in the states that an operator leaves behind, as JSON; this version and older versions run it.

    python handover.py leave STATE...        prints each resource in its state
    python handover.py take <those           prints the actions of the operator for each resource
    python -m tests.unit.reconcile.handover keep FILE     stores this version's modules, at its release

The simulated world belongs to the version whose code runs.
"""

import dataclasses
import json
import sys
import tarfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

from heteroinfer_operator import cluster
from tests.unit.reconcile import world as worlds
from tests.unit.reconcile.world import World, cpu_pair

FIELDS = ("spec", "status", "generation", "version", "manifests", "uids", "created")
ENGINE_OF_OURS = {"args": ["--tensor-parallel-size", "2"]}


def served(**spec: Any) -> World:
    world = World(spec=cpu_pair(**spec))
    world.serve()
    return world


def rest(world: World) -> World:
    """Removes deleted pods and runs all following reconciles."""
    for _ in range(2):
        world.settle()
        world.reap()
    world.settle()
    return world


def again() -> World:
    world = served()
    world.end_pod("demo-0-1-1")
    world.now += timedelta(seconds=60)
    rest(world).all_ready()
    return rest(world)


def failed() -> World:
    world = served(restart={"maxRestarts": 0})
    world.end_pod("demo-0-1-1")
    return rest(world)


def backoff() -> World:
    world = again()
    world.end_pod(world.workers()[1])
    return rest(world)


def changed(*, replicas: int = 1, **spec: Any) -> World:
    world = served(replicas=replicas)
    world.change_spec(**spec)
    return rest(world)


def unowned() -> World:
    world = served()
    world.pods["demo-0-1-1"] = dataclasses.replace(world.pods["demo-0-1-1"], lost_owner=True)
    return rest(world)


def stuck() -> World:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection()
    world.settle()
    name, waits = world.workers()[0], cast("Any", getattr(worlds, "waits", str))
    waiting = waits("ErrImagePull: no such tag")
    world.pods[name] = dataclasses.replace(world.pods[name], node="node", waiting=waiting)
    return rest(world)


def relabelled(name: str, **labels: str | None) -> World:
    world = served()
    world.relabel(name, **labels)
    return rest(world)


def reader_relabelled() -> World:
    world = World(spec=cpu_pair())
    world.settle()
    world.relabel(next(iter(world.pods)), resource=None)
    return rest(world)


def cut_off() -> World:
    world = World(spec=cpu_pair())
    world.refuses["Service", "demo"] = "Service demo exists and is not ours"
    world.serve()
    return world


def unreadable() -> World:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection("no such file", exit_code=1)
    return rest(world)


def noted() -> World:
    role = {"device": "CPU", "resources": {"limits": {"cpu": "4", "memory": "8Gi"}}}
    roles = [{"name": "one", **role}, {"name": "two", **role, "device": "GPU", "deviceMemory": "8Gi"}]
    world = World(spec=cpu_pair(roles=roles), nodes=None)
    world.serve()
    return world


STATES: dict[str, Callable[[], World]] = {
    "serving": lambda: served(replicas=2),
    "again": again,
    "failed": failed,
    "backoff": backoff,
    "paused": lambda: changed(suspend=True),
    "refused": lambda: changed(engine=ENGINE_OF_OURS),
    "rolling": lambda: changed(replicas=2, engine={"maxModelLen": 256}),
    "stuck": stuck,
    "leader relabelled": lambda: relabelled("demo-0-1-0", leader=None),
    "leader of others": lambda: relabelled("demo-0-1-0", resource="other"),
    "follower relabelled": lambda: relabelled("demo-0-1-1", leader="true"),
    "reader relabelled": reader_relabelled,
    "unowned": unowned,
    "cut off": cut_off,
    "unreadable": unreadable,
    "noted": noted,
}


def to_json(world: World) -> dict[str, Any]:
    pods = [dataclasses.asdict(pod) for pod in world.pods.values()]
    for pod in pods:
        waiting = pod["waiting"]
        pod["waiting"] = waiting if isinstance(waiting, str) else ": ".join(waiting or ())
    refuses = [[*key, words] for key, words in getattr(world, "refuses", {}).items()]
    objects, nodes = list(world.objects.values()), world.nodes is not None
    kept = {field: getattr(world, field) for field in FIELDS}
    others = {"now": world.now, "finalizers": list(world.finalizers), "nodes": nodes}
    return {**kept, **others, "pods": pods, "objects": objects, "refuses": refuses}


def from_json(value: dict[str, Any]) -> World:
    kept = {field: value[field] for field in FIELDS}
    finalizers = tuple(value["finalizers"])
    world = World(**kept, now=datetime.fromisoformat(value["now"]), finalizers=finalizers)
    if not value["nodes"]:
        world.nodes = None
    world.objects = {(item["kind"], item["metadata"]["name"]): item for item in value["objects"]}
    for kind, name, words in value["refuses"]:
        world.refuses[kind, name] = words
    known = {field.name for field in dataclasses.fields(cluster.PodView)}
    for pod in value["pods"]:
        fields: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in pod.items() if key in known
        }
        for key in ("created", "gone_by"):
            fields[key] = fields[key] and datetime.fromisoformat(fields[key])
        if pod["termination"]:
            terms = {field.name for field in dataclasses.fields(cluster.ContainerTermination)}
            ended = {key: v for key, v in pod["termination"].items() if key in terms}
            fields["termination"] = cluster.ContainerTermination(**ended)
        if hasattr(worlds, "waits"):
            fields["waiting"] = worlds.waits(pod["waiting"])
        world.pods[pod["name"]] = cluster.PodView(**fields)
    return world


def taken(world: World) -> dict[str, Any]:
    """Returns the actions of an operator that has just started."""
    before = dict(world.pods)
    writes: list[str] = []
    budgets: list[str] = []
    for _ in range(4):
        world.step()
        writes += [type(action).__name__ for action in world.writes if not _is_of_budget(action)]
        budgets += [type(action).__name__ for action in world.writes if _is_of_budget(action)]
    same = {name for name, pod in before.items() if world.pods.get(name) == pod}
    pods = sorted(same ^ (before.keys() | world.pods.keys()))
    return {
        "status": world.status,
        "events": world.events,
        "writes": writes,
        "budgets": budgets,
        "touched": pods,
    }


def _is_of_budget(action: Any) -> bool:
    kind = getattr(action, "kind", "") or getattr(action, "manifest", {}).get("kind")
    return bool(kind == "PodDisruptionBudget")


def keep(file: Path) -> None:
    """Stores all imported modules: the simulated world needs them."""
    modules = {
        module.__file__: name for name, module in sys.modules.items() if getattr(module, "__file__", "")
    }
    with tarfile.open(file, "w:xz") as archive:
        for path, name in sorted(modules.items(), key=lambda item: item[1]):
            if path and name.split(".")[0] in ("heteroinfer_operator", "heteroinfer_contract", "tests"):
                parts = name.split(".") + (["__init__"] if path.endswith("__init__.py") else [])
                archive.add(path, arcname="/".join(parts) + ".py")


def main(action: str, *arguments: str) -> None:
    if action == "keep":
        keep(Path(arguments[0]))
        return
    if action == "leave":
        found = {state: to_json(STATES[state]()) for state in arguments}
    else:
        found = {state: taken(from_json(value)) for state, value in json.load(sys.stdin).items()}
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
