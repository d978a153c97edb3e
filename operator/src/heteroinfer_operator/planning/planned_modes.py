"""The mode of a plan: its checks, its feed-forward ranks, and its notes for the user. Pure."""

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
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.planning.advice import Advice, advise
from heteroinfer_operator.planning.feed_forward import (
    FeedForwardPart,
    check_feed_forward,
    choose_feed_forward_part,
    feed_forward_seconds,
    rank_weight_bytes,
    stage_rank_missing_bytes,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import Sizes, stage_budgets
from heteroinfer_operator.planning.prediction import StepLoad, count_reads
from heteroinfer_operator.planning.rates import Rates
from heteroinfer_operator.planning.ring_choice import RingChooser
from heteroinfer_operator.planning.topology import Topology
from heteroinfer_operator.vllm_support.cpu_ranks import check_load_format


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMode:
    """A mode with the values that its plan needs.

    Attributes:
        remote: in mode FeedForward, the experts or MLPs that CPU ranks compute for the only stage; otherwise
            None.
    """

    topology: Topology
    profile: ModelProfile
    engine: EngineSettings
    inventory: Inventory
    remote: FeedForwardPart | None = None

    @property
    def stage_profile(self) -> ModelProfile:
        """The part of the model that the stages compute."""
        return self.profile if self.remote is None else self.remote.remaining

    def feed_forward_ranks(self) -> tuple[RankAssignment, ...]:
        """Returns the feed-forward ranks without predicted times, numbered after the ranks of the stage.

        The feed-forward ranks in the GPU's pod come first, with local ranks after those of the stage. The
        other feed-forward ranks are in pods without a GPU, which are numbered after the GPU's pod.
        """
        stage_ranks, remote = self.topology.stages[0], self.remote
        if remote is None:
            return ()
        ranks, pod = [], stage_ranks[0].pod
        for rank_set, rank_indices in remote.numbered_sets:
            for index in rank_indices:
                index_in_set = index - rank_indices[0]
                index_in_pod = index_in_set % rank_set.per_pod
                if rank_set.pods and not index_in_pod:
                    pod += 1  # the first rank of another pod
                local_rank = index_in_pod if rank_set.pods else len(stage_ranks) + index_in_set
                role = rank_set.role.name
                ranks.append(self._build_feed_forward_rank(remote, index, role, pod, local_rank))
        return tuple(ranks)

    def _build_feed_forward_rank(
        self, remote: FeedForwardPart, index: int, role: str, pod: int, local_rank: int
    ) -> RankAssignment:
        """Returns the assignment of one feed-forward rank.

        Args:
            index: index among the feed-forward ranks.
        """
        return RankAssignment(
            rank=len(self.topology.stages[0]) + index,
            local_rank=local_rank,
            pod=pod,
            role=role,
            device=Device.CPU,
            stage=0,
            tensor_rank=index,
            first_layer=remote.layers[0],  # this span may contain other layers, too
            end_layer=remote.layers[-1] + 1,
            kv_cache_bytes=0,
            weight_bytes=rank_weight_bytes(remote, self.engine, index),
            feed_forward=FeedForwardShare(
                layers=remote.layers,
                share=remote.shares[index] if remote.shares else BY_RATE,
                by_experts=remote.by_experts,
            ),
        )

    def advise(self, plan: Plan, rates: Sequence[Rates]) -> Advice:
        """Returns notes on the plan for the user, one line each.

        In mode FeedForward, the notes compare the plan with mode Pipeline, and report CPU limits, unknown GPU
        memory, and GPUs that need no CPU ranks.

        Args:
            rates: assumed speed of each rank, by rank.
        """
        topology, remote, engine = self.topology, self.remote, self.engine
        if remote is None:
            return advise(topology, plan, self.profile, self.inventory)
        notes = [
            self._compare_with_pipeline(remote, rates[0], rates[-remote.ranks :]),
            *self._cpu_limit_notes(remote),
        ]
        placed_role = topology.stages[0][0].placed
        if placed_role.device is not Device.GPU:
            return Advice(notes=tuple(notes))
        stage_budget = stage_budgets(
            topology.stages,
            Sizes.for_settings(self.profile, engine, topology.tensor, batches=1),
            self.inventory,
        )[0]
        if not stage_budget.is_known:
            feed_forward = placed_role.role.feed_forward
            has_user_layers = feed_forward is not None and feed_forward.layers is not None
            if not has_user_layers:
                notes.append("the GPU's memory is unknown, so the plan moves only 1 layer. Set deviceMemory")
            return Advice(notes=tuple(notes))
        needs_feed_forward = stage_rank_missing_bytes(topology, self.profile, engine, self.inventory) > 0
        if needs_feed_forward:
            return Advice(notes=tuple(notes))
        not_needed = self._not_needed_note(remote)
        return Advice(notes=(*notes, not_needed), hybrid_not_needed=not_needed)

    def _not_needed_note(self, remote: FeedForwardPart) -> str:
        """Returns the note that the GPUs can hold the model without feed-forward ranks."""
        gpus, other_mode = (
            ("GPUs", Mode.TENSOR.value) if self.topology.tensor > 1 else ("GPU", Mode.PIPELINE.value)
        )
        has_other_pods = any(rank_set.pods for rank_set in remote.sets)
        return (
            f"feed-forward ranks are not needed: the {gpus} can hold the model and the KV cache for one "
            f"request of {self.engine.max_model_len:,} tokens. CPUs add capacity, not speed. Use mode "
            f"{other_mode} without {'CPU roles' if has_other_pods else 'feedForward'}"
        )

    def _cpu_limit_notes(self, remote: FeedForwardPart) -> list[str]:
        """Returns a note for each role whose pods have a CPU limit: threads of such pods do not wait busily.

        If feed-forward ranks are in other pods than the GPU, each pod also has a thread that exchanges rows
        between pods. This thread sleeps, too.
        """
        roles_of_other_pods = [rank_set.role for rank_set in remote.sets if rank_set.pods]
        relay = ", and the thread that exchanges rows with other pods," if roles_of_other_pods else ""
        return [
            f"feed-forward ranks of role {role.name}{relay} sleep between layers, which makes each step "
            "slower, because the pods have a CPU limit that busy waiting would use up. Remove limits.cpu, or "
            "use nodes with the static CPU manager"
            for role in (self.topology.stages[0][0].placed.role, *roles_of_other_pods)
            if role.resources and role.resources.limits and "cpu" in role.resources.limits
        ]

    def _compare_with_pipeline(
        self, remote: FeedForwardPart, stage_rates: Rates, feed_forward_rates: Sequence[Rates]
    ) -> str:
        """Returns the predicted time of this mode, and of mode Pipeline with the same memory, as text.

        Args:
            stage_rates: rates of the rank with attention.
            feed_forward_rates: rates of each feed-forward rank.
        """
        profile, engine = self.profile, self.engine
        moved_bytes = sum(remote.profile.layer_bytes)
        # In mode Pipeline, CPUs would have the first layers: as many as need at least the same memory.
        num_layers_on_cpus, held_bytes = 0, 0
        while held_bytes < moved_bytes and num_layers_on_cpus < profile.num_layers:
            held_bytes += profile.layer_bytes[num_layers_on_cpus]
            num_layers_on_cpus += 1
        pipeline_s = self._pipeline_s(remote.tensor, num_layers_on_cpus, stage_rates, feed_forward_rates)
        stage_sizes = Sizes.for_settings(remote.remaining, engine, remote.tensor, batches=1)
        this_mode_s = count_reads(
            stage_sizes, 0, profile.num_layers, StepLoad(), has_head=True, engine=engine
        ).seconds(stage_rates)
        this_mode_s += max(feed_forward_seconds(remote, engine, feed_forward_rates, StepLoad()))
        kind = "experts" if profile.experts else "MLPs"
        layers = f"{len(remote.layers)} layer{'' if len(remote.layers) == 1 else 's'}"
        whole_layers = f"{num_layers_on_cpus} whole layer{'' if num_layers_on_cpus == 1 else 's'}"
        return (
            f"CPUs have the {kind} of {layers} ({format_bytes(moved_bytes)}): a step of one request computes "
            f"for about {this_mode_s * 1e3:.1f} ms. Mode Pipeline with the same memory would have "
            f"{whole_layers} on CPUs and compute for {pipeline_s * 1e3:.1f} ms"
        )

    def _pipeline_s(
        self, gpus: int, num_layers_on_cpus: int, gpu_rates: Rates, cpu_rates: Sequence[Rates]
    ) -> float:
        """Returns the predicted seconds of a step of one request in mode Pipeline.

        Args:
            gpus: number of GPUs, which share the other layers.
            num_layers_on_cpus: number of layers on CPUs, which are the first layers.
            cpu_rates: rates of each CPU rank.
        """
        profile, engine = self.profile, self.engine
        cpu_sizes = Sizes.for_settings(profile, engine, tensor=1, batches=1)
        gpu_sizes = Sizes.for_settings(profile, engine, gpus, batches=1)
        cpu_reads = count_reads(cpu_sizes, 0, num_layers_on_cpus, StepLoad(), has_head=False, engine=engine)
        gpu_reads = count_reads(
            gpu_sizes, num_layers_on_cpus, profile.num_layers, StepLoad(), has_head=True, engine=engine
        )
        # The CPU ranks divide their layers by their speed, so that all of these ranks take equally long.
        cpus_s = 1 / sum(1 / cpu_reads.seconds(rates) for rates in cpu_rates)
        return cpus_s + gpu_reads.seconds(gpu_rates)


def check_cpu_support(
    mode: Mode, topology: Topology, profile: ModelProfile, engine: EngineSettings
) -> tuple[str, ...]:
    """Checks that CPU ranks can compute their part in this mode. Returns notes for the user, one line each.

    Raises:
        PlanError: the CPU ranks cannot compute their part, however much memory they have.
    """
    if mode is not Mode.FEED_FORWARD:
        if topology.has_cpu:  # `check_support` makes the other checks of CPU ranks in stages
            check_load_format(engine)
        return ()
    return check_feed_forward(topology.stages[0][0].placed.role.name, profile, engine)


def build_planned_mode(
    mode: Mode,
    spec: HeteroInferenceSpec,
    topology: Topology,
    profile: ModelProfile,
    engine: EngineSettings,
    inventory: Inventory,
) -> PlannedMode:
    """Returns a mode with the parts of the model for its ranks, and with the engine's settings.

    Raises:
        PlanError: feed-forward ranks cannot compute this model, or their part does not fit.
    """
    remote: FeedForwardPart | None = None
    if mode is Mode.FEED_FORWARD:
        without_ring = choose_feed_forward_part(spec.roles, topology, profile, engine, inventory)
        chooser = RingChooser(
            topology=topology,
            profile=profile,
            engine=engine,
            inventory=inventory,
            load=spec.planning.chosen_load,
            tokens=spec.engine.max_batched_tokens,
        )
        remote, engine = chooser.choose(without_ring)
    return PlannedMode(topology=topology, profile=profile, engine=engine, inventory=inventory, remote=remote)
