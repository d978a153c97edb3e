"""Plans for tests of this machine's processes: a stage a rank, four layers each."""

from heteroinfer_contract.plan import Device, EngineSettings, Mode, Plan, RankAssignment
from heteroinfer_operator.api import HeteroInferenceSpec

LAYERS = 4
ENGINE = EngineSettings(
    model="/m",
    served_name="m",
    dtype="float32",
    max_model_len=512,
    max_num_batched_tokens=512,
    max_num_seqs=16,
    block_size=32,
)


def plan(*pods: tuple[str, Device, int]) -> Plan:
    """Returns the plan of pods, each with its role, its device and its number of ranks."""
    seats = [
        (pod, role, device, local) for pod, (role, device, ranks) in enumerate(pods) for local in range(ranks)
    ]
    return Plan(
        mode=Mode.PIPELINE,
        tensor_parallel_size=1,
        pipeline_parallel_size=len(seats),
        ranks=tuple(
            RankAssignment(
                rank=rank,
                local_rank=local,
                pod=pod,
                role=role,
                device=device,
                stage=rank,
                tensor_rank=0,
                first_layer=rank * LAYERS,
                end_layer=(rank + 1) * LAYERS,
                kv_cache_bytes=2**20,
            )
            for rank, (pod, role, device, local) in enumerate(seats)
        ),
        engine=ENGINE,
    )


def plan_of(spec: HeteroInferenceSpec) -> Plan:
    """Returns a plan for the roles of a spec, as they are listed."""
    pods = [role for role in spec.roles for _ in range(role.pods)]
    return plan(*((role.name, role.device, role.ranks_per_pod) for role in pods))
