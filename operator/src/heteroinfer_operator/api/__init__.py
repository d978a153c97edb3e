"""Models of the HeteroInference resource, spec and status, from and to JSON values.

    spec = parse_spec(body["spec"])                  # SpecError names the field
    status = HeteroInferenceStatus(replicas=1)
    patch = {"status": status.dump()}                # camelCase, no nulls

Pure: imports pydantic and the contract only.
"""

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api.base import Model, StatusModel, ValidationRule, When
from heteroinfer_operator.api.chosen_mode import (
    ChosenMode,
    candidate_modes,
    infer_mode,
    read_chosen_mode,
)
from heteroinfer_operator.api.condition import (
    Condition,
    ConditionStatus,
    ConditionType,
    is_reason,
    merge_conditions,
)
from heteroinfer_operator.api.engine import DType, EngineSpec
from heteroinfer_operator.api.env_vars import EnvSource, EnvVar, KeyReference
from heteroinfer_operator.api.model_source import AccessMode, ModelCache, ModelSpec, TokenReference
from heteroinfer_operator.api.resource import (
    MAX_NAME_LENGTH,
    HeteroInference,
    Metadata,
    ResourceKey,
    parse_lifecycle,
    parse_resource,
    parse_resources,
    parse_spec,
    parse_status,
    parse_stored_spec,
    storable_status,
)
from heteroinfer_operator.api.role import DEFAULT_GPU_RESOURCE, FeedForwardSpec, Resources, RoleSpec
from heteroinfer_operator.api.spec import (
    MAX_GROUPS,
    MAX_RANKS,
    MAX_ROLES,
    HeteroInferenceSpec,
    LifecycleSpec,
    LoadSpec,
    NetworkSpec,
    ParallelismSpec,
    PlanningSpec,
    RestartSpec,
    RolloutSpec,
    SchedulingSpec,
    ShortageAction,
    ShortageSpec,
    StageOrder,
    StartupSpec,
)
from heteroinfer_operator.api.status import (
    MAX_EPOCH,
    MAX_FAILURES,
    MAX_PLANS,
    MAX_PROFILE_LENGTH,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    HeteroInferenceStatus,
    KvCacheStatus,
    KvLimit,
    KvStatus,
    ModelPhase,
    ModelStatus,
    PlanRole,
    PlanStatus,
    RankEntry,
    RankPlan,
    RetiredGroup,
    StartupPhase,
    StartupStatus,
    Summary,
)
from heteroinfer_operator.api.template import Affinity, PodTemplate, Toleration
