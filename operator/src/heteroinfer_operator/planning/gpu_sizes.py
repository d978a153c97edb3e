"""Compares the GPU memory that a plan needs with the labels of nodes. Pure."""

from collections.abc import Mapping, Sequence
from math import ceil

from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.nodes.node_platform import accepts_platform, select_platform
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import FreeNode, device_memory_mib
from heteroinfer_operator.planning.expert_ring import page_table_bytes
from heteroinfer_operator.planning.gpu_floor import GPU_USABLE, GpuFloor


def gpu_memory_mib(
    spec: HeteroInferenceSpec, plan: Plan, labelled: Mapping[str, int], gpu_floor: GpuFloor | None
) -> dict[int, int]:
    """Returns the minimum memory in MiB that a pod's GPU must have, by pod index.

    The scheduler may choose another node than the plan. The plan's weights and KV cache must fit on the GPUs
    of that node, too. The result contains only pods whose GPUs have a memory label.

    Args:
        labelled: memory of the largest labelled GPU in bytes, by role.
        gpu_floor: memory that a GPU needs besides weights and KV cache; None if unknown.
    """
    labelled_roles = {
        role.name for role in spec.roles if role.device_memory is None and role.name in labelled
    }

    def least_bytes(rank: RankAssignment) -> int:
        """Returns the minimum memory of a GPU on which the rank fits, in bytes."""
        without_floor = ceil(_planned_bytes(plan, rank) / GPU_USABLE)
        with_floor = _needed_gpu_bytes(plan, rank, gpu_floor)
        # Some earlier versions planned without the floor. Such a plan may need more than the largest GPU of
        # its role has. Then a minimum with the floor would exclude all nodes.
        was_planned_with_floor = with_floor <= labelled[rank.role]
        return max(without_floor, with_floor) if was_planned_with_floor else without_floor

    return {
        pod.index: max(ceil(least_bytes(rank) / 2**20) for rank in pod.ranks if rank.device is Device.GPU)
        for pod in plan.pods
        if pod.role in labelled_roles and pod.device is Device.GPU
    }


def largest_gpu_bytes_by_role(spec: HeteroInferenceSpec, nodes: Sequence[NodeView]) -> dict[str, int]:
    """Returns the memory of each role's largest GPU in bytes, from the nodes' memory labels.

    Leaves out a role if a node with the role's GPU resource lacks the label: that node may have a larger GPU.
    Also leaves out roles with deviceMemory. Ignores nodes of another platform, because the role's pods cannot
    run there.
    """
    largest = {}
    for role in spec.roles:
        if role.device is not Device.GPU or role.device_memory is not None:
            continue
        fields = select_platform(role.template.dump() if role.template else {})
        nodes_with_gpus = [
            node
            for node in nodes
            if node.allocatable.get(role.gpu_resource, 0) > 0 and accepts_platform(fields, node.labels)
        ]
        sizes_mib = [device_memory_mib(node, role.gpu_resource) for node in nodes_with_gpus]
        known_mib = [size for size in sizes_mib if size is not None]
        if known_mib and len(known_mib) == len(nodes_with_gpus):
            largest[role.name] = max(known_mib) * 2**20
    return largest


def fits_gpus(
    spec: HeteroInferenceSpec,
    plan: Plan,
    gpu_floor: GpuFloor | None,
    free_nodes: Sequence[FreeNode],
    nodes: Mapping[int, str],
    known_nodes: Mapping[int, str],
) -> bool:
    """Reports whether the GPUs of the chosen nodes have the memory that the plan needs.

    A GPU without a memory label counts as large enough if the user sets `deviceMemory` of the role, or if the
    pod's known GPU has no such label, too.

    Args:
        gpu_floor: memory that a GPU needs besides weights and KV cache; None if unknown.
        nodes: node by pod index.
        known_nodes: other nodes of the same pods, by pod index. The plan fits their GPUs.
    """
    roles = {role.name: role for role in spec.roles}
    views = {free_node.node.name: free_node.node for free_node in free_nodes}
    for rank in plan.ranks:
        if rank.device is Device.GPU:
            role = roles[rank.role]
            chosen_mib = device_memory_mib(views[nodes[rank.pod]], role.gpu_resource)
            known_mib = device_memory_mib(views[known_nodes[rank.pod]], role.gpu_resource)
            if chosen_mib is None and known_mib is not None and role.device_memory is None:
                return False
            if chosen_mib is not None and _needed_gpu_bytes(plan, rank, gpu_floor) > chosen_mib * 2**20:
                return False
    return True


def _needed_gpu_bytes(plan: Plan, rank: RankAssignment, gpu_floor: GpuFloor | None) -> int:
    """Returns the bytes of a GPU that a rank uses: the bytes of the plan, plus `gpu_floor` if known."""
    plan_bytes = _planned_bytes(plan, rank)
    if gpu_floor is None:
        return plan_bytes
    nccl_gpus = 1 if plan.is_mixed(rank.stage) else plan.tensor_parallel_size  # CPU ranks cannot use NCCL
    is_last = rank.stage == plan.pipeline_parallel_size - 1
    return plan_bytes + gpu_floor.total(embeds=rank.stage == 0, samples=is_last, gpus=nccl_gpus)


def _planned_bytes(plan: Plan, rank: RankAssignment) -> int:
    """Returns the bytes that a rank needs on its GPU, with page tables for the host memory that it maps."""
    own_bytes = rank.weight_bytes + rank.kv_cache_bytes + rank.ring_bytes
    if not rank.ring_bytes:
        return own_bytes
    mapped_bytes = sum(each.weight_bytes for each in plan.feed_forward_ranks(rank.stage))
    return own_bytes + page_table_bytes(mapped_bytes)
