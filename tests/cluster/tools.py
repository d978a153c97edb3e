"""Builds programs from pinned Go modules, and keeps them in the cache by a hash of their inputs.

A folder in modules/ has go.mod (with its `tool` lines) and go.sum, and the source of our own programs.
modules/common has most programs, so that their shared imports are compiled once. The name of a build is a
hash of these files and of the build steps here. So a changed pin causes a new build, and an old build is
never used for it.
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

RECIPE = "3"  # raise this number when the build steps change
RENAMED = {"server": "etcd"}  # Go names a program after its package, and etcd's package is .../server/v3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Programs of one pinned Go module.

    Attributes:
        name: name of the build in the cache.
        programs: programs that the build must contain.
        module: folder in modules/; by default the name.
        packages: packages to compile; by default those of the module's `tool` lines.
        tags: build tags, which leave out parts.
        stamped: whether the linker gets Kubernetes' version.
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
    """Returns a tool of modules/common, in which all tools have the same versions of their imports."""
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
"""Control planes of later versions, which have other APIs of gangs, by their minor version."""
ETCD = _common("etcd", "go.etcd.io/etcd/server/v3", programs=["etcd"])
HELM = _common("helm", "helm.sh/helm/v3/cmd/helm")
COREDNS = _common("coredns", "./coredns")
"""With the plugins that a node needs here. CoreDNS's own main program has the SDKs of three clouds."""
CONTAINERD = Tool(name="containerd", programs=("containerd", "ctr", "containerd-shim-runc-v2"))
"""Debian 12 has containerd 1.6, which does not support image volumes."""
KWOK = Tool(name="kwok", programs=("kwok",))
# Debian's Prometheus has no discovery for Kubernetes. This build has only that discovery.
PROMETHEUS = _common(
    "prometheus",
    f"{_PROMETHEUS}/prometheus",
    f"{_PROMETHEUS}/promtool",
    tags=("remove_all_sd", "enable_kubernetes_sd"),
)
PROMETHEUS_OPERATOR = Tool(name="prometheus-operator", programs=("operator",))
"""It needs an older Prometheus than ours. Its other versions are those of modules/common, so most is
shared."""
PROMETHEUS_ADAPTER = Tool(name="prometheus-adapter", programs=("adapter",))
KUEUE = Tool(name="kueue", programs=("kueue",))
VOLCANO = Tool(name="volcano", programs=("scheduler", "controller-manager"))
KUBE_SCORE = Tool(name="kube-score", programs=("kube-score",))
"""Checks the objects that the chart renders."""
ENDPOINT_PICKER = Tool(name="endpoint-picker", programs=("epp",))
"""From the Gateway API Inference Extension. Its module also has the CRD of InferencePools."""
ENVOY_GATEWAY = Tool(name="envoy-gateway", programs=("envoy-gateway",))
"""Configures Envoy from Gateways and HTTPRoutes. Its module also has its Helm chart."""
KEDA = Tool(name="keda", programs=("adapter", "operator"))
"""Scales by the requests that the HTTP add-on counts. Its module also has its manifests and CRDs."""
HTTP_ADD_ON = Tool(name="http-add-on", programs=("interceptor", "operator", "scaler"))
"""Holds and counts requests. Its module also has its manifests and CRD. It uses KEDA's versions of shared
imports, so that most is compiled once."""
KSTATUS = _common("kstatus", "./kstatus")
"""Our own program: computes the kstatus that Flux and other tools read from a resource's status."""
COSCHEDULING = Tool(name="scheduler-plugins", programs=("scheduler",))
CONTROL_PLANE = (ETCD, KUBERNETES, HELM, KSTATUS)
"""Tools for tests of an API server."""
NODE = (*CONTROL_PLANE, COREDNS, CONTAINERD)
"""Tools for tests of a real node."""
WATCHING = (PROMETHEUS, PROMETHEUS_OPERATOR, PROMETHEUS_ADAPTER)
"""Additional tools for the tests of dashboards, alerts and autoscaling."""
GANGS = (*CONTROL_PLANE, *LATER_KUBERNETES.values(), KWOK, KUEUE, VOLCANO, COSCHEDULING)
"""Tools of `make gangs`."""
ROUTES = (*NODE, ENDPOINT_PICKER, ENVOY_GATEWAY, KEDA, HTTP_ADD_ON)
"""Tools of `make routes`."""
SETS = {
    "control-plane": CONTROL_PLANE,
    "node": NODE,
    "all": (*NODE, *WATCHING),
    "gangs": GANGS,
    "routes": ROUTES,
}
"""By their names for `python -m tests.cluster build`. Other tools are built when they are needed."""


def build_ldflags(tool: Tool) -> str:
    """Returns the linker flags: no symbol tables, and Kubernetes' version.

    Without the version from the linker, `kubectl version` and all checks of the server's version fail to
    parse `v0.0.0-master+$Format:%H$`.
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
    """Returns the folder for the programs of this version of the module, which may not exist yet."""
    made_of = hashlib.sha256()
    for part in ((tool.source / "go.mod").read_bytes(), (tool.source / "go.sum").read_bytes()):
        made_of.update(hashlib.sha256(part).digest())
    for source in sorted(tool.source.rglob("*.go")):
        made_of.update(hashlib.sha256(source.read_bytes()).digest())
    made_of.update(" ".join([build_ldflags(tool), RECIPE, *tool.tags, *tool.packages]).encode())
    return cache_folder() / "tools" / f"{tool.name}-{made_of.hexdigest()[:16]}" / "bin"


def program(tool: Tool, name: str) -> Path:
    """Returns the path of a program. Builds its module first if the cache lacks it."""
    return ensure_built(tool) / name


def ensure_built(tool: Tool) -> Path:
    """Returns the folder with the tool's programs. Compiles them if the cache lacks them.

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
                # Without debug information from the compiler, which the linker drops anyway, a build takes a
                # fifth less time.
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
    """Returns the folder with the source of a module that the go.mod of `modules/<folder>` pins.

    Tests use some files of other projects as data, such as their CRDs.

    Raises:
        ClusterError: the download failed, or the source does not match go.sum.
    """
    command = ["go", "mod", "download", "-json", module]
    output = run(
        command,
        timeout_s=300,
        environment={"GOFLAGS": "-mod=readonly"},
        cwd=CLUSTER_SOURCE / "modules" / folder,
    )
    return Path(json.loads(output)["Dir"])
