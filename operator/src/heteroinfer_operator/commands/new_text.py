"""The file that `heteroinfer new` writes: a resource in YAML, with comments and the plan's figures. Pure."""

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
"""Column of the comments."""
_PLAIN: Final = re.compile(
    r"[a-z]+://[A-Za-z0-9/._@:-]+|(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][a-z0-9-]*"
)
"""Text that YAML reads as a string without quotes; numbers, dates and booleans need them."""


def render(
    draft: Draft, layout: GroupLayout, planned: Planned, hardware: GivenHardware, summary: Sequence[str]
) -> str:
    """Returns the commented YAML of a resource.

    Args:
        hardware: all hardware of the user, which the layout may not need.
        summary: the plan's verdict, figures, ranks and notes, for the comment at the top.
    """
    engine = planned.plan.engine
    lines = [
        *_comment(_introduction(draft, layout, hardware), summary),
        f"apiVersion: {names.API_GROUP}/{names.API_VERSION}",
        f"kind: {names.KIND}",
        "metadata:",
        _line(
            f"  name: {quote_yaml(draft.name)}",
            "also the model's name in the API, unless servedName is set",
        ),
        "spec:",
        *_model(draft, layout),
        "  engine:",
        _line(
            f"    maxModelLen: {engine.max_model_len}",
            f"prompt and answer, in tokens; the model supports {draft.profile.max_position_embeddings:,}",
        ),
        "  parallelism:",
        _line(f"    mode: {layout.mode.value}", _explain_mode(layout, planned)),
        "  roles:",
        *_roles(layout, planned),
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _comment(introduction: Sequence[str], summary: Sequence[str]) -> list[str]:
    return [f"# {printable(line)}" if line else "#" for line in (*introduction, "", *summary, "", *_NEXT)]


_NEXT: Final = (
    "More figures:           heteroinfer plan -f FILE --explain --choices",
    "Serve it here:          heteroinfer up -f FILE",
    "Serve it on a cluster:  kubectl apply -f FILE",
)


def _introduction(draft: Draft, layout: GroupLayout, hardware: GivenHardware) -> list[str]:
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
            "The CPUs are not used: the GPUs hold the whole model, and CPU ranks would make it slower."
        )
    return lines


def _line(text: str, comment: str) -> str:
    return f"{text.ljust(_COLUMN)} # {printable(comment)}"


def quote_yaml(text: str) -> str:
    """Returns a text as a YAML string."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _model(draft: Draft, layout: GroupLayout) -> list[str]:
    uri = draft.model["uri"]
    where = f"    uri: {quote_yaml(uri)}"
    if uri.startswith(FILE_SCHEME):
        comment = (
            "a folder of this machine; on a cluster use pvc://CLAIM/FOLDER, with the files in that volume"
        )
        return ["  model:", _line(where, comment)]
    if not uri.startswith(HUB_SCHEME):
        return ["  model:", where]
    cache, revision = draft.cache(layout), draft.model.get("revision")
    shared = "ReadWriteOnce works if all pods run on one node" if layout.num_pods > 1 else "one pod reads it"
    return [
        "  model:",
        where,
        f"    revision: {quote_yaml(revision)}"
        if revision
        else _line("    # revision: main", "branch, tag or commit"),
        _line("    # tokenSecretRef: {name: hub}", "for private and gated models, after"),
        _line("", "kubectl create secret generic hub --from-literal=token=hf_..."),
        _line("    cache:", "a volume that the operator creates for the model's files"),
        _line(f"      size: {cache['size']}", "space for two revisions"),
        _line(f"      accessMode: {cache['accessMode']}", shared),
    ]


def _explain_mode(layout: GroupLayout, planned: Planned) -> str:
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


def _roles(layout: GroupLayout, planned: Planned) -> list[str]:
    hardware, lines = layout.hardware, []
    if layout.has_cpu_role:
        lines += [
            "  - name: cpu",
            "    device: CPU",
            "    resources:",
            _line(
                f'      requests: {{cpu: "{hardware.cpus}", memory: {hardware.cpu_memory}}}',
                "more cores read weights faster, up to the node's memory bandwidth",
            ),
            _line(f"      limits: {{memory: {hardware.cpu_memory}}}", _describe_bytes(planned, "cpu")),
        ]
    if hardware.gpus:
        lines += [
            "  - name: gpu",
            "    device: GPU",
            *([_line(f"    pods: {hardware.gpus}", "one GPU each")] if hardware.gpus > 1 else []),
            _line(
                f"    deviceMemory: {hardware.gpu_memory}",
                f"memory of one GPU; {_describe_bytes(planned, 'gpu')}",
            ),
            _line("    resources:", "host memory and cores of a GPU's pod; adjust them to your nodes"),
            f'      requests: {{cpu: "{layout.own_cpus}", memory: {layout.own_memory}}}',
            f"      limits: {{memory: {layout.own_memory}}}",
        ]
    if layout.mode is Mode.FEED_FORWARD:
        lines += [
            _line("    feedForward:", "CPU ranks in the GPU's pod, in addition to its resources"),
            _line(
                "      ranks: 1", "one per NUMA node of the host is fastest; divide cpu and memory among them"
            ),
            f'      cpu: "{layout.feed_forward_cpus}"',
            _line(
                f"      memory: {layout.feed_forward_memory}", _describe_bytes(planned, "gpu", remote=True)
            ),
        ]
    return lines


def _describe_bytes(planned: Planned, role: str, *, remote: bool = False) -> str:
    """Returns the bytes that the fullest rank of a role takes."""
    ranks = [r for r in planned.plan.ranks if r.role == role and (r.feed_forward is not None) is remote]
    return f"the plan uses {format_bytes(max(r.weight_bytes + r.kv_cache_bytes for r in ranks))}"
