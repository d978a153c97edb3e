"""Renders the file that `heteroinfer new` writes: YAML with comments and the plan's figures. Pure."""

import json
import re
from collections.abc import Sequence
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import HUB_SCHEME
from heteroinfer_contract.plan import Mode
from heteroinfer_contract.printable import format_bytes, printable
from heteroinfer_operator.commands.new_layouts import FILE_SCHEME, Draft, GivenHardware, GroupLayout
from heteroinfer_operator.planning import Planned

_COLUMN: Final = 40
"""Column in which comments begin."""
_PLAIN: Final = re.compile(
    r"[a-z]+://[A-Za-z0-9/._@:-]+|(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][a-z0-9-]*"
)
"""Text that YAML reads as a string even without quotes. Numbers, dates and booleans need quotes."""


def render(
    draft: Draft, layout: GroupLayout, planned: Planned, hardware: GivenHardware, summary: Sequence[str]
) -> str:
    """Returns the commented YAML of a resource.

    Args:
        hardware: all hardware of the user. The layout may leave the CPUs unused.
        summary: the plan's verdict, figures, ranks and notes, for the comment at the top.
    """
    engine = planned.plan.engine
    lines = [
        *_head_comment(_introduction(draft, layout, hardware), summary, _next_commands(draft)),
        f"apiVersion: {names.API_GROUP}/{names.API_VERSION}",
        f"kind: {names.KIND}",
        "metadata:",
        _commented_line(
            f"  name: {quote_yaml(draft.name)}",
            "also the model's name in the API, unless servedName is set",
        ),
        "spec:",
        *_model_lines(draft, layout),
        "  engine:",
        _commented_line(
            f"    maxModelLen: {engine.max_model_len}",
            f"prompt and answer, in tokens; the model supports {draft.profile.max_position_embeddings:,}",
        ),
        "  parallelism:",
        _commented_line(f"    mode: {layout.mode.value}", _explain_mode(layout, planned)),
        "  roles:",
        *_role_lines(layout, planned),
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _head_comment(
    introduction: Sequence[str], summary: Sequence[str], next_commands: Sequence[str]
) -> list[str]:
    """Returns the comment at the top of the file: introduction, summary and next commands."""
    lines = (*introduction, "", *summary, "", *next_commands)
    return [f"# {printable(line)}" if line else "#" for line in lines]


def _next_commands(draft: Draft) -> list[str]:
    """Returns the next commands for the file. Most clusters refuse a folder of a node."""
    is_folder = draft.model["uri"].startswith(FILE_SCHEME)
    copy = "copy the folder to a claim, set model.uri to pvc://CLAIM/FOLDER, then " if is_folder else ""
    return [
        "More figures:           heteroinfer plan -f FILE --explain --choices",
        "Serve it here:          heteroinfer up -f FILE",
        f"Serve it on a cluster:  {copy}kubectl apply -f FILE",
    ]


def _introduction(draft: Draft, layout: GroupLayout, hardware: GivenHardware) -> list[str]:
    """Returns the first lines of the file's comment: model, hardware, and unused CPUs."""
    profile = draft.profile
    scheme = "" if profile.scheme.bits == 16 else f", {profile.scheme}"
    size = format_bytes(profile.total_bytes + profile.encoder_bytes)
    same_host = " of the same host" if layout.mode is Mode.FEED_FORWARD else ""
    lines = [
        f"{draft.model['uri']}: {profile.architecture}, {profile.dtype}{scheme}, {size} of weights.",
        f"Planned by `heteroinfer new` for {layout.hardware}{same_host}.",
    ]
    if hardware.cpus and not layout.hardware.cpus:
        lines.append(
            "The CPUs are not used: the GPUs hold the whole model, and CPU ranks would slow each step."
        )
    return lines


def _commented_line(text: str, comment: str) -> str:
    """Returns a line of YAML with a comment behind it."""
    return f"{text.ljust(_COLUMN)} # {printable(comment)}"


def quote_yaml(text: str) -> str:
    """Returns a text as a YAML string."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _model_lines(draft: Draft, layout: GroupLayout) -> list[str]:
    """Returns the lines of spec.model."""
    uri = draft.model["uri"]
    uri_line = f"    uri: {quote_yaml(uri)}"
    if uri.startswith(FILE_SCHEME):
        comment = (
            "a folder of this machine; on a cluster, copy the files to a volume and use pvc://CLAIM/FOLDER"
        )
        return ["  model:", _commented_line(uri_line, comment)]
    if not uri.startswith(HUB_SCHEME):
        return ["  model:", uri_line]
    cache, revision = draft.cache(layout), draft.model.get("revision")
    access_comment = (
        "ReadWriteOnce works if all pods run on one node"
        if layout.num_pods > 1
        else "only one pod reads the volume"
    )
    return [
        "  model:",
        uri_line,
        f"    revision: {quote_yaml(revision)}"
        if revision
        else _commented_line("    # revision: main", "branch, tag or commit"),
        _commented_line("    # tokenSecretRef: {name: hub}", "for private and gated models; first run:"),
        _commented_line("", "kubectl create secret generic hub --from-literal=token=hf_..."),
        _commented_line("    cache:", "a volume that the operator creates for the model's files"),
        _commented_line(f"      size: {cache['size']}", "space for two revisions"),
        _commented_line(f"      accessMode: {cache['accessMode']}", access_comment),
    ]


def _explain_mode(layout: GroupLayout, planned: Planned) -> str:
    """Describes which device has which part of the model."""
    if layout.mode is Mode.FEED_FORWARD:
        moved = len(planned.remote.layers) if planned.remote is not None else 0
        layers = planned.request.profile.num_layers
        kind = "experts" if planned.request.profile.experts else "MLPs"
        return f"the GPU has attention; CPUs of its host have the {kind} of {moved} of {layers} layers"
    if layout.mode is Mode.TENSOR:
        return "each layer is split between the GPUs and CPUs"
    if layout.has_cpu_role and layout.hardware.gpus:
        return "GPUs and CPUs have whole layers"
    return "each pod has whole layers"


def _role_lines(layout: GroupLayout, planned: Planned) -> list[str]:
    """Returns the lines of spec.roles, in the order of `Draft.resource`, with comments about their values."""
    lines: list[str] = []
    if layout.has_cpu_role:
        lines += _cpu_role_lines(layout, planned)
    if layout.hardware.gpus:
        lines += _gpu_role_lines(layout, planned)
    if layout.mode is Mode.FEED_FORWARD:  # a part of the GPU role
        lines += _feed_forward_lines(layout, planned)
    return lines


def _cpu_role_lines(layout: GroupLayout, planned: Planned) -> list[str]:
    """Returns the lines of the role of CPU pods."""
    hardware = layout.hardware
    return [
        "  - name: cpu",
        "    device: CPU",
        "    resources:",
        _commented_line(
            f'      requests: {{cpu: "{hardware.cpus}", memory: {hardware.cpu_memory}}}',
            "more cores read weights faster, up to the node's memory bandwidth",
        ),
        _commented_line(f"      limits: {{memory: {hardware.cpu_memory}}}", _describe_bytes(planned, "cpu")),
    ]


def _gpu_role_lines(layout: GroupLayout, planned: Planned) -> list[str]:
    """Returns the lines of the role of GPU pods, without feedForward."""
    hardware = layout.hardware
    lines = ["  - name: gpu", "    device: GPU"]
    if hardware.gpus > 1:
        lines.append(_commented_line(f"    pods: {hardware.gpus}", "one GPU each"))
    return [
        *lines,
        _commented_line(
            f"    deviceMemory: {hardware.gpu_memory}",
            f"memory of one GPU; {_describe_bytes(planned, 'gpu')}",
        ),
        _commented_line("    resources:", "host memory and cores of a GPU's pod; adjust them to your nodes"),
        f'      requests: {{cpu: "{layout.gpu_pod_cpus}", memory: {layout.gpu_pod_memory}}}',
        f"      limits: {{memory: {layout.gpu_pod_memory}}}",
    ]


def _feed_forward_lines(layout: GroupLayout, planned: Planned) -> list[str]:
    """Returns the lines of feedForward of the GPU role."""
    return [
        _commented_line(
            "    feedForward:",
            "CPU ranks in the GPU's pod, which gets this cpu and memory in addition to the resources above",
        ),
        _commented_line(
            "      ranks: 1", "one per NUMA node of the host is fastest; divide cpu and memory among them"
        ),
        f'      cpu: "{layout.feed_forward_cpus}"',
        _commented_line(
            f"      memory: {layout.feed_forward_memory}", _describe_bytes(planned, "gpu", remote=True)
        ),
    ]


def _describe_bytes(planned: Planned, role: str, *, remote: bool = False) -> str:
    """Describes the bytes that the largest rank of a role uses.

    Args:
        remote: selects the feed-forward ranks of the role; otherwise its other ranks.
    """
    ranks = [
        rank for rank in planned.plan.ranks if rank.role == role and (rank.feed_forward is not None) is remote
    ]
    return f"the plan uses {format_bytes(max(rank.weight_bytes + rank.kv_cache_bytes for rank in ranks))}"
