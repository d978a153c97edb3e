"""`spec.model`: the model to serve, and the place of its files. Pure."""

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from heteroinfer_operator.api.base import ByteSize, Model, ObjectName, RuleReason, ValidationRule, cel_text
from heteroinfer_operator.api.env_vars import ConfigMapKey, SecretKey
from heteroinfer_operator.api.pod_fields import ClassName, KeyOfObject
from heteroinfer_operator.api.role import Resources
from heteroinfer_operator.quantity import parse_quantity

_URI_PATTERNS: Final = (
    "hf://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?",
    "pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*",
    "file://(/[^/]+)+",
    "oci://[a-z0-9][A-Za-z0-9._:/@-]*(#[^/]+(/[^/]+)*)?",
)
"""One pattern for each scheme, with the same meaning in RE2 (CEL) and Python."""
_DIGEST: Final = "^[^#]*@sha256:[0-9a-f]{64}(#|$)"
"""Pattern of an image's URI that has a digest."""


class AccessMode(StrEnum):
    """Access mode of a volume."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_ONLY_MANY = "ReadOnlyMany"
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class TokenReference(Model):
    """A Secret with the access token of a model hub."""

    name: ObjectName
    """Name of the Secret."""
    key: KeyOfObject = "token"
    """Key in the Secret."""


class CaBundle(Model):
    """Certificate authorities in PEM, from a ConfigMap or a Secret of the same namespace."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="must set exactly one of configMapKeyRef and secretKeyRef",
            holds=lambda bundle: (bundle.secret_key_ref is None) != (bundle.config_map_key_ref is None),
        ),
    )

    config_map_key_ref: ConfigMapKey | None = None
    """Key of a ConfigMap with the certificates."""
    secret_key_ref: SecretKey | None = None
    """Key of a Secret with the certificates."""


class ModelCache(Model):
    """Volume for the files of a downloaded model: an existing claim, or a new claim."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.claimName) != has(self.size)",
            message="must set either claimName (for an existing claim) or size (for a new claim)",
            holds=lambda cache: (cache.claim_name is None) != (cache.size is None),
        ),
        ValidationRule(
            field="claimName",
            reason=RuleReason.FORBIDDEN,
            cel="!has(self.claimName) || !(has(self.storageClassName) || has(self.accessMode))",
            message="must be unset if storageClassName or accessMode is set, because both are for a new "
            "claim",
            fix="Remove storageClassName and accessMode, or replace claimName by size",
            holds=lambda cache: (
                cache.claim_name is None or (cache.storage_class_name is None and cache.access_mode is None)
            ),
        ),
        ValidationRule(
            field="size",
            cel="!has(self.size) || (type(self.size) == int ? self.size > 0 : self.size.matches('[1-9]'))",
            message="must be more than 0",
            fix="Set the size of the model's files, such as 40Gi",
            holds=lambda cache: cache.size is None or parse_quantity(cache.size) > 0,
        ),
    )

    claim_name: ObjectName | None = None
    """Name of an existing PersistentVolumeClaim. Set either claimName or size."""
    size: ByteSize | None = None
    """Size of the PersistentVolumeClaim that the operator creates. The claim is deleted with the resource.
    Another size creates another claim and downloads the model again; to keep the download, enlarge the claim
    itself. Set either claimName or size."""
    storage_class_name: ClassName | None = None
    """Storage class of the claim that the operator creates. Default: the cluster's default class."""
    access_mode: AccessMode | None = None
    """Access mode of the claim that the operator creates. ReadWriteMany: pods of several nodes can mount it.
    ReadWriteOnce: pods of one node can mount it. ReadWriteOncePod: a single pod can mount it. ReadOnlyMany:
    pods of several nodes can mount it read-only. Default: ReadWriteMany."""
    keep: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Number of the model's newest commits to keep in the cache, in addition to the commits in use. A
    download removes all other commits. 0: downloads remove no commit. Default: 2 in a claim that the operator
    creates; 0 in an existing claim."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the volume itself: all fields except `keep`."""
        return {key: value for key, value in self.dump().items() if key != "keep"}


class ModelSpec(Model):
    """The model to serve."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="uri",
            cel=" || ".join(f"self.uri.matches({cel_text(f'^{pattern}$')})" for pattern in _URI_PATTERNS),
            message="must be hf://ORG/MODEL, pvc://CLAIM/PATH, oci://REGISTRY/NAME@sha256:DIGEST#FOLDER"
            " or file:///ABSOLUTE/PATH",
            holds=lambda model: any(re.fullmatch(pattern, model.uri) for pattern in _URI_PATTERNS),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
        ValidationRule(
            field="uri",
            cel=f"!self.uri.startsWith('oci://') || self.uri.matches({cel_text(_DIGEST)})",
            message="an image must have a digest, because nodes may have different images with the same tag",
            fix="Use oci://REGISTRY/NAME@sha256:DIGEST (`crane digest REGISTRY/NAME:TAG` prints the digest)",
            holds=lambda model: (
                not model.uri.startswith("oci://") or re.search(_DIGEST, model.uri) is not None
            ),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
        ValidationRule(
            field="uri",
            cel="!self.uri.matches('(^|[/#])[.][.](/|$)')",
            message="must be a path without '..'",
            fix="Write the path without '..'",
            holds=lambda model: ".." not in re.split("[/#]", model.uri),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
        ValidationRule(
            field="uri",
            cel="self.uri.startsWith('hf://') "
            "|| !(has(self.revision) || has(self.tokenSecretRef) || has(self.cache))",
            message="must be an hf:// model if revision, tokenSecretRef or cache is set",
            fix="Remove revision, tokenSecretRef and cache",
            holds=lambda model: (
                model.uri.startswith("hf://")
                or (model.revision or model.token_secret_ref or model.cache) is None
            ),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
    )

    uri: Annotated[str, Field(min_length=1, max_length=512)]
    """Location of the model. hf://ORG/MODEL: a model on a hub. pvc://CLAIM/PATH: a folder of a
    PersistentVolumeClaim. oci://REGISTRY/NAME@sha256:DIGEST#FOLDER: the files of an image, on Kubernetes 1.35
    or later; #FOLDER is optional. file:///ABSOLUTE/PATH: a folder on each node."""
    revision: (
        Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None
    ) = None
    """Branch, tag or commit of an hf:// model. The operator finds the commit once. To get newer files, change
    this field. Default: main."""
    served_name: (
        Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")] | None
    ) = None
    """Name of the model in the OpenAI API. Default: the name of the resource."""
    token_secret_ref: TokenReference | None = None
    """Access token for the hub. Only the pod that downloads the model gets it. Default: none."""
    cache: ModelCache | None = None
    """Volume for the files of an hf:// model; workers mount it read-only. Required for hf:// models."""
    resources: Resources | None = None
    """Resources of the pod that downloads or inspects the model. Default: for each resource that is not set
    here, that of the chart's podResources.fetch (hf:// models) or podResources.inspect."""
    ca_bundle: CaBundle | None = None
    """Certificate authorities that the pods trust in addition to the system's, while they download and serve.
    Default: none."""
