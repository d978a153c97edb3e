"""Environment variables of workers: their sources, and the names that no resource may set. Pure.

For other names, the installation has a list of allowed names (`reconcile.allowed_env`).
"""

from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import Model, ObjectName, RuleReason, ValidationRule, cel_text
from heteroinfer_operator.api.pod_fields import KeyOfObject


class KeyReference(Model):
    """A key of a Secret or a ConfigMap of the same namespace."""

    name: ObjectName
    """Name of the Secret or ConfigMap."""
    key: KeyOfObject
    """Key in the Secret or ConfigMap."""


class ConfigMapKey(KeyReference):
    """A key of a ConfigMap of the same namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: KeyOfObject
    """Key in the ConfigMap."""


class SecretKey(KeyReference):
    """A key of a Secret of the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: KeyOfObject
    """Key in the Secret."""


class EnvSource(Model):
    """Source of a variable's value: exactly one of the fields."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="must set exactly one of secretKeyRef and configMapKeyRef",
            holds=lambda source: (source.secret_key_ref is None) != (source.config_map_key_ref is None),
        ),
    )

    secret_key_ref: SecretKey | None = None
    """Key of a Secret with the value."""
    config_map_key_ref: ConfigMapKey | None = None
    """Key of a ConfigMap with the value."""


OWNED_ENV: Final = (
    names.ENV_LAYER_PARTITION,
    names.ENV_TARGET_DEVICE,
    names.ENV_HETEROGENEOUS_DEVICE,
    names.ENV_VISIBLE_GPUS,
    "VLLM_CPU_KVCACHE_SPACE",
    names.ENV_V2_MODEL_RUNNER,
    "VLLM_PLUGINS",
    names.ENV_OWN_ADDRESS,
    "VLLM_PORT",
    names.ENV_GLOO_INTERFACE,
    "NCCL_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Variables that no resource may set, because the plan or the supervisor sets them, or because another value
would break the group."""
OWNED_ENV_PREFIX: Final = "HETEROINFER_"
SECRET_ENV: Final = (names.ENV_HUB_TOKEN, "VLLM_API_KEY")
"""Variables that hold a secret, which must not be written into the resource."""


def _is_reserved(name: str) -> bool:
    """Reports whether HeteroInfer reserves a variable of this name."""
    return name in OWNED_ENV or (name.startswith(OWNED_ENV_PREFIX) and name not in names.USER_ENV)


def _to_cel_list(values: Iterable[str]) -> str:
    """Returns texts as a list literal of CEL."""
    return f"[{', '.join(map(cel_text, values))}]"


_IS_RESERVED: Final = (
    f"(self.name in {_to_cel_list(OWNED_ENV)} || (self.name.startsWith({cel_text(OWNED_ENV_PREFIX)}) "
    f"&& !(self.name in {_to_cel_list(names.USER_ENV)})))"
)


def _build_rule(
    cel: str,
    holds: Callable[["EnvVar"], bool],
    message: str,
    *,
    field: str,
    fix: str = "",
    reason: RuleReason = RuleReason.FORBIDDEN,
) -> ValidationRule:
    """Returns a rule whose message contains the name of the variable."""
    return ValidationRule(
        field=field,
        cel=cel,
        holds=holds,
        message=message,
        fix=fix,
        reason=reason,
        got="%s",
        got_cel=("self.name",),
        got_values=lambda variable: (variable.name,),
    )


class EnvVar(Model):
    """An environment variable of every worker."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        _build_rule(
            "has(self.value) != has(self.valueFrom)",
            lambda variable: (variable.value is None) != (variable.value_from is None),
            "must set exactly one of value and valueFrom",
            field="",
            reason=RuleReason.INVALID,
        ),
        _build_rule(
            f"!{_IS_RESERVED}",
            lambda variable: not _is_reserved(variable.name),
            "must not be a variable that HeteroInfer reserves",
            field="name",
            fix="Remove the variable. The fields roles[].device, roles[].layers and network.interface set "
            "the device, the layers and the network interface",
        ),
        _build_rule(
            f"!(self.name in {_to_cel_list(SECRET_ENV)}) "
            "|| (has(self.valueFrom) && has(self.valueFrom.secretKeyRef))",
            lambda variable: (
                variable.name not in SECRET_ENV
                or (variable.value_from is not None and variable.value_from.secret_key_ref is not None)
            ),
            "must come from a Secret, because every reader of the resource would see the value",
            field="",
            fix="Store the value in a Secret, and set valueFrom.secretKeyRef",
        ),
    )

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", min_length=1, max_length=128)]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Value of the variable. Set either value or valueFrom."""
    value_from: EnvSource | None = None
    """Source of the value. Set either value or valueFrom."""
