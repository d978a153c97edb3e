"""The modes of a plan: their checks, their ranks outside of the stages, and their advice. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import (
    BY_RATE,
    Device,
    EngineSettings,
    FeedForwardShare,
    Mode,
    Plan,
    RankAssignment,
)
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.planning.advice import Advice, advise
from heteroinfer_operator.planning.feed_forward import (
    Remote,
    check_feed_forward,
    choose_remote,
    feed_forward_seconds,
    missing_bytes,
    rank_weight_bytes,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import Sizes, stage_budgets
from heteroinfer_operator.planning.prediction import Load, count_reads
from heteroinfer_operator.planning.rates import Rates
from heteroinfer_operator.planning.topology import Topology
from heteroinfer_operator.vllm_support.cpu_ranks import check_load_format


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMode:
    """A mode with its ranks' parts of the model.

    Attributes:
        remote: the part of CPU ranks that compute experts or MLPs for the only stage, in mode FeedForward.
    """

    topology: Topology
    profile: ModelProfile
    engine: EngineSettings
    inventory: Inventory
    remote: Remote | None = None

    @property
    def in_stages(self) -> ModelProfile:
        """The part of the model that the stages compute."""
        return self.profile if self.remote is None else self.remote.kept

    def ranks_beside(self) -> tuple[RankAssignment, ...]:
        """Returns the ranks outside of the stages, without predicted times; they have the highest numbers."""
        own, remote = self.topology.stages[0], self.remote
        if remote is None:
            return ()
        ranks, pod = [], own[0].pod
        for each, numbers in remote.numbered_sets:
            for number in numbers:
                position = number - numbers[0]
                in_pod = position % each.per_pod
                if each.pods and not in_pod:
                    pod += 1
                ranks.append(
                    RankAssignment(
                        rank=len(own) + number,
                        local_rank=in_pod if each.pods else len(own) + position,
                        pod=pod,
                        role=each.role.name,
                        device=Device.CPU,
                        stage=0,
                        tensor_rank=number,
                        first_layer=remote.layers[0],
                        end_layer=remote.layers[-1] + 1,
                        kv_cache_bytes=0,
                        weight_bytes=rank_weight_bytes(remote, self.engine, number),
                        feed_forward=FeedForwardShare(
                            layers=remote.layers,
                            share=remote.shares[number] if remote.shares else BY_RATE,
                            by_experts=remote.by_experts,
                        ),
                    )
                )
        return tuple(ranks)

    def advise(self, plan: Plan, rates: Sequence[Rates]) -> Advice:
        """Returns notes on the plan for the user; `rates` are by rank.

        In mode FeedForward: a comparison with mode Pipeline, and whether the GPU needs CPUs at all.
        """
        topology, remote, engine = self.topology, self.remote, self.engine
        if remote is None:
            return advise(topology, plan, self.profile, self.inventory)
        notes = [self._in_pipeline(remote, rates[0], rates[-remote.ranks :])]
        placed = topology.stages[0][0].placed
        with_ranks = [placed.role] * (not remote.sets[0].pods)
        with_ranks += [each.role for each in remote.sets if each.pods]
        notes += [
            f"the pods of role {role.name} have a CPU limit: feed-forward ranks sleep between layers instead "
            "of spinning, because spinning would use up the limit. Remove limits.cpu, or use nodes with the "
            "static CPU manager"
            for role in with_ranks
            if role.resources and role.resources.limits and "cpu" in role.resources.limits
        ]
        if placed.device is not Device.GPU:
            return Advice(notes=tuple(notes))
        stage = stage_budgets(topology.stages, Sizes.of(self.profile, engine, 1, batches=1), self.inventory)[
            0
        ]
        if not stage.is_known:
            if placed.role.feed_forward is None or placed.role.feed_forward.layers is None:
                notes.append("the GPU's memory is unknown. Set deviceMemory to plan layers by memory")
            return Advice(notes=tuple(notes))
        if missing_bytes(topology, self.profile, engine, self.inventory) > 0:
            return Advice(notes=tuple(notes))
        words = (
            "feed-forward ranks not needed: the GPU holds the model and KV cache for one request of "
            f"{engine.max_model_len:,} tokens. CPUs add capacity, not speed. Use mode Pipeline without "
            f"{'CPU roles' if any(each.pods for each in remote.sets) else 'feedForward'}"
        )
        return Advice(notes=(*notes, words), hybrid_not_needed=words)

    def _in_pipeline(self, remote: Remote, own: Rates, theirs: Sequence[Rates]) -> str:
        """Returns the compute time of this mode and of mode Pipeline with the same memory, as text.

        Args:
            own: rates of the role's own rank.
            theirs: rates of each feed-forward rank.
        """
        profile, engine = self.profile, self.engine
        moved = sum(remote.profile.layer_bytes)
        count, held = 0, 0
        while held < moved and count < profile.num_layers:
            held += profile.layer_bytes[count]
            count += 1
        sizes = Sizes.of(profile, engine, 1, batches=1)
        on_cpus = count_reads(sizes, 0, count, Load(), last=False, engine=engine)
        on_gpu = count_reads(sizes, count, profile.num_layers, Load(), last=True, engine=engine)
        pipeline_s = 1 / sum(1 / on_cpus.seconds(each) for each in theirs) + on_gpu.seconds(own)
        kept = Sizes.of(remote.kept, engine, 1, batches=1)
        ours_s = count_reads(kept, 0, profile.num_layers, Load(), last=True, engine=engine).seconds(own)
        ours_s += max(feed_forward_seconds(remote, engine, theirs, Load()))
        kind = "experts" if profile.experts else "MLPs"
        layers = f"{len(remote.layers)} layer{'' if len(remote.layers) == 1 else 's'}"
        whole = f"{count} whole layer{'' if count == 1 else 's'}"
        return (
            f"CPUs have the {kind} of {layers} ({format_bytes(moved)}): a step of one request computes for "
            f"about {ours_s * 1e3:.1f} ms. Mode Pipeline with the same memory would have {whole} on CPUs and "
            f"compute for {pipeline_s * 1e3:.1f} ms"
        )


def check_mode(
    mode: Mode, topology: Topology, profile: ModelProfile, engine: EngineSettings
) -> tuple[str, ...]:
    """Checks that CPU ranks can compute their part in this mode. Returns notes for the user, one line each.

    Raises:
        PlanError: they cannot, whatever the memory.
    """
    if mode is not Mode.FEED_FORWARD:
        if topology.has_cpu:
            check_load_format(engine)
        return ()
    return check_feed_forward(topology.stages[0][0].placed.role.name, profile, engine)


def choose_mode(
    mode: Mode,
    roles: Sequence[RoleSpec],
    topology: Topology,
    profile: ModelProfile,
    engine: EngineSettings,
    inventory: Inventory,
) -> PlannedMode:
    """Returns the mode with its ranks' parts of the model.

    Args:
        roles: all roles of the group.

    Raises:
        PlanError: feed-forward ranks cannot compute this model, or their part does not fit.
    """
    remote = None
    if mode is Mode.FEED_FORWARD:
        remote = choose_remote(roles, topology, profile, engine, inventory)
    return PlannedMode(topology=topology, profile=profile, engine=engine, inventory=inventory, remote=remote)
