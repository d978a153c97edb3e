"""The programs that are built from pinned Go modules, and kept in the cache by what they are made of.

A folder under modules/ holds go.mod (with its `tool` lines) and go.sum, and of a program of our own
its source; modules/common has most, so that what several of them import is compiled once. A build is
named by the hash of these and of the recipe here, so that a changed pin is a new build and an old one
is never taken for it.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.errors import ClusterError
from tests.cluster.folders import CLUSTER_SOURCE, cache_folder, locked
from tests.cluster.processes import run
from tests.cluster.progress import say

RECIPE = "3"  # raise it when the way of building changes
RENAMED = {"server": "etcd"}  # Go names a program after its package, and etcd's is .../server/v3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Programs of one pinned Go module.

    Attributes:
        name: of the build in the cache.
        programs: what it must yield.
        module: the folder under modules/, by default the name.
        packages: what is compiled, by default all that the module's `tool` lines name.
        tags: leave parts out.
        stamped: whether the linker tells Kubernetes' version.
    """

    name: str
    programs: tuple[str, ...]
    module: str = ""
    packages: tuple[str, ...] = ("tool",)
    tags: tuple[str, ...] = ()
    stamped: bool = False

    @property
    def source(self) -> Path:
        return CLUSTER_SOURCE / "modules" / (self.module or self.name)


def _common(name: str, *packages: str, programs: Sequence[str] = (), **others: Any) -> Tool:
    """Returns a tool of modules/common, where all have one version of what they import."""
    named = tuple(programs) or tuple(package.rpartition("/")[2] for package in packages)
    return Tool(name=name, programs=named, module="common", packages=packages, **others)


_KUBERNETES = ("apiserver", "controller-manager", "proxy", "scheduler")
_PROMETHEUS = "github.com/prometheus/prometheus/cmd"
KUBERNETES = _common(
    "kubernetes",
    *(f"k8s.io/kubernetes/cmd/kube-{part}" for part in _KUBERNETES),
    *(f"k8s.io/kubernetes/cmd/{program}" for program in ("kubectl", "kubelet", "kubemark")),
    stamped=True,
)
LATER_KUBERNETES = {
    minor: Tool(
        name=f"kubernetes-{minor}",
        programs=tuple(f"kube-{part}" for part in ("apiserver", "controller-manager", "scheduler")),
        stamped=True,
    )
    for minor in ("1.36", "1.37")
}
"""Control planes of later versions, whose API of gangs is another one; by their minor version."""
ETCD = _common("etcd", "go.etcd.io/etcd/server/v3", programs=["etcd"])
HELM = _common("helm", "helm.sh/helm/v3/cmd/helm")
COREDNS = _common("coredns", "./coredns")
"""With the plugins that a node here has; CoreDNS's own main program has the SDKs of three clouds."""
CONTAINERD = Tool(name="containerd", programs=("containerd", "ctr", "containerd-shim-runc-v2"))
"""Debian 12 has containerd 1.6, which mounts no image volumes."""
KWOK = Tool(name="kwok", programs=("kwok",))
# Debian's Prometheus discovers nothing on Kubernetes; of all discoveries only that one is built.
PROMETHEUS = _common(
    "prometheus",
    f"{_PROMETHEUS}/prometheus",
    f"{_PROMETHEUS}/promtool",
    tags=("remove_all_sd", "enable_kubernetes_sd"),
)
PROMETHEUS_OPERATOR = Tool(name="prometheus-operator", programs=("operator",))
"""It needs an older Prometheus than ours; else its list is that of modules/common, and most is shared."""
PROMETHEUS_ADAPTER = Tool(name="prometheus-adapter", programs=("adapter",))
KUEUE = Tool(name="kueue", programs=("kueue",))
VOLCANO = Tool(name="volcano", programs=("scheduler", "controller-manager"))
KUBE_SCORE = Tool(name="kube-score", programs=("kube-score",))
"""Judges what the chart renders to."""
ENDPOINT_PICKER = Tool(name="endpoint-picker", programs=("epp",))
"""Of the Gateway API Inference Extension; its module also has the CRD of InferencePools."""
ENVOY_GATEWAY = Tool(name="envoy-gateway", programs=("envoy-gateway",))
"""Configures Envoy from Gateways and HTTPRoutes; its module also has its Helm chart."""
KEDA = Tool(name="keda", programs=("adapter", "operator"))
"""Scales by what the HTTP add-on counts; its module also has its manifests and CRDs."""
HTTP_ADD_ON = Tool(name="http-add-on", programs=("interceptor", "operator", "scaler"))
"""Holds and counts requests; its module also has its manifests and CRD.

It takes KEDA's versions of what both import, so that most is compiled once.
"""
KSTATUS = _common("kstatus", "./kstatus")
"""Ours: what Flux and others make of a resource's status."""
COSCHEDULING = Tool(name="scheduler-plugins", programs=("scheduler",))
CONTROL_PLANE = (ETCD, KUBERNETES, HELM, KSTATUS)
"""What tests of an API server need."""
NODE = (*CONTROL_PLANE, COREDNS, CONTAINERD)
"""What tests of a real node need."""
WATCHING = (PROMETHEUS, PROMETHEUS_OPERATOR, PROMETHEUS_ADAPTER)
"""What the tests of dashboards, alerts and autoscaling need besides."""
GANGS = (*CONTROL_PLANE, *LATER_KUBERNETES.values(), KWOK, KUEUE, VOLCANO, COSCHEDULING)
"""What `make gangs` needs."""
ROUTES = (*NODE, ENDPOINT_PICKER, ENVOY_GATEWAY, KEDA, HTTP_ADD_ON)
"""What `make routes` needs."""
SETS = {
    "control-plane": CONTROL_PLANE,
    "node": NODE,
    "all": (*NODE, *WATCHING),
    "gangs": GANGS,
    "routes": ROUTES,
}
"""By the name that `python -m tests.cluster build` takes; the others are built where they are used."""


def build_ldflags(tool: Tool) -> str:
    """Returns the linker flags: no symbol tables, and for Kubernetes its version.

    Kubernetes takes its version from the linker; without it `kubectl version` and every check
    of the server's version fails to parse `v0.0.0-master+$Format:%H$`.
    """
    if not tool.stamped:
        return "-s -w"
    found = re.search(r"k8s\.io/kubernetes v(1)\.(\d+)\.\d+", (tool.source / "go.mod").read_text())
    if found is None:
        raise ClusterError(f"{tool.source / 'go.mod'} requires no k8s.io/kubernetes v1.x.y")
    stamp = {
        "gitVersion": found.group(0).split()[1],
        "gitMajor": found.group(1),
        "gitMinor": found.group(2),
        "gitCommit": "0" * 40,
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s -w", *(f"-X {p}.{key}={value}" for p in packages for key, value in stamp.items())])


def program_folder(tool: Tool) -> Path:
    """Returns the folder that holds, or will hold, the programs of this very version of the module."""
    made_of = hashlib.sha256()
    for part in ((tool.source / "go.mod").read_bytes(), (tool.source / "go.sum").read_bytes()):
        made_of.update(hashlib.sha256(part).digest())
    for source in sorted(tool.source.rglob("*.go")):
        made_of.update(hashlib.sha256(source.read_bytes()).digest())
    made_of.update(" ".join([build_ldflags(tool), RECIPE, *tool.tags, *tool.packages]).encode())
    return cache_folder() / "tools" / f"{tool.name}-{made_of.hexdigest()[:16]}" / "bin"


def program(tool: Tool, name: str) -> Path:
    """Returns the path of a built program, building its module first when it is not in the cache."""
    return ensure_built(tool) / name


def ensure_built(tool: Tool) -> Path:
    """Returns the folder with the tool's programs; compiles them when the cache has none.

    Raises:
        ClusterError: Go is missing, or the build failed.
    """
    folder = program_folder(tool)
    if folder.is_dir():
        return folder
    with locked(cache_folder() / "tools" / f".{tool.name}.lock"):
        if not folder.is_dir():
            _compile(tool, folder)
    return folder


def _compile(tool: Tool, folder: Path) -> None:
    """Compiles a tool with Go into a temporary folder, and moves it to `folder` if it is complete."""
    go = shutil.which("go")
    if go is None:
        raise ClusterError("`go` is not on the PATH. Install Go 1.25 or newer (https://go.dev/dl)")
    began = time.monotonic()
    say(f"building {tool.name} from source (some minutes, once) …")
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent.parent, prefix=f".{tool.name}-") as draft:
        made = Path(draft) / "made"
        built = subprocess.run(
            [
                # The linker drops what a debugger reads: not to make it saves a fifth of the time.
                *("nice", go, "install", "-trimpath", "-gcflags=all=-dwarf=false"),
                *("-ldflags", build_ldflags(tool)),
                *("-tags", ",".join(tool.tags), *tool.packages),
            ],
            cwd=tool.source,
            env={**os.environ, "GOBIN": str(made / "bin"), "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"},
            check=False,
        )
        if built.returncode:
            raise ClusterError(
                f"building {tool.name} failed with exit code {built.returncode}. Read Go's output above"
            )
        for old, new in RENAMED.items():
            if (made / "bin" / old).exists():
                (made / "bin" / old).rename(made / "bin" / new)
        lacking = [name for name in tool.programs if not (made / "bin" / name).exists()]
        if lacking:
            raise ClusterError(
                f"building {tool.name} made no {', '.join(lacking)}. Check the tool lines of its go.mod"
            )
        made.rename(folder.parent)
    say(f"built {tool.name} in {time.monotonic() - began:.0f} s")


def source_folder(folder: str, module: str) -> Path:
    """Returns where the source of a module lies that the go.mod of `modules/<folder>` pins.

    Some files of a project are data to us: the definitions of its resources.

    Raises:
        ClusterError: it could not be had, or is not what go.sum says.
    """
    command = ["go", "mod", "download", "-json", module]
    output = run(
        command,
        timeout_s=300,
        environment={"GOFLAGS": "-mod=readonly"},
        cwd=CLUSTER_SOURCE / "modules" / folder,
    )
    return Path(json.loads(output)["Dir"])
