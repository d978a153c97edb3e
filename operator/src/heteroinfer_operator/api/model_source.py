"""`spec.model`: which model is served, and where it comes from. Pure."""

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from heteroinfer_operator.api.base import ByteSize, Model, ObjectName, ValidationRule, cel_text
from heteroinfer_operator.api.env_vars import KeyReference
from heteroinfer_operator.api.pod_fields import ClassName, KeyOfObject
from heteroinfer_operator.api.role import Resources
from heteroinfer_operator.quantity import parse_quantity

_URI_PATTERNS: Final = (
    "hf://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?",
    "pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*",
    "file://(/[^/]+)+",
    "oci://[a-z0-9][A-Za-z0-9._:/@-]*(#[^/]+(/[^/]+)*)?",
)
"""One a scheme; understood alike by RE2 (CEL) and Python."""
_DIGEST: Final = "^[^#]*@sha256:[0-9a-f]{64}(#|$)"
"""Of an image's URI."""


class AccessMode(StrEnum):
    """How a volume may be mounted."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_ONLY_MANY = "ReadOnlyMany"
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class TokenReference(Model):
    """A Secret that holds the token for a model hub."""

    name: ObjectName
    """Name of the Secret."""
    key: KeyOfObject = "token"
    """Key in it."""


class CaBundle(Model):
    """Certificate authorities in PEM: a key of a ConfigMap or of a Secret of the same namespace."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="caBundle: give exactly one of configMapKeyRef and secretKeyRef",
            holds=lambda own: (own.secret_key_ref is None) != (own.config_map_key_ref is None),
        ),
    )

    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""
    secret_key_ref: KeyReference | None = None
    """A key of a Secret."""


class ModelCache(Model):
    """Where a downloaded model is kept: an existing claim, or a new one."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.claimName) != has(self.size)",
            message="give either claimName (an existing claim) or size (a claim to make)",
            holds=lambda cache: (cache.claim_name is None) != (cache.size is None),
        ),
        ValidationRule(
            cel="!has(self.claimName) || !(has(self.storageClassName) || has(self.accessMode))",
            message="storageClassName and accessMode are of a claim to make; remove them, or claimName",
            holds=lambda cache: (
                cache.claim_name is None or (cache.storage_class_name or cache.access_mode) is None
            ),
        ),
        ValidationRule(
            cel="!has(self.size) || (type(self.size) == int ? self.size > 0 : self.size.matches('[1-9]'))",
            message="size: expected more than 0; set what the model's files need, such as 40Gi",
            holds=lambda cache: cache.size is None or parse_quantity(cache.size) > 0,
        ),
    )

    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim."""
    size: ByteSize | None = None
    """Size of the claim to make, which goes with the resource; another size makes a new claim."""
    storage_class_name: ClassName | None = None
    """Storage class of the claim to make."""
    access_mode: AccessMode | None = None
    """Access mode of the claim to make; ReadWriteMany if not given."""
    keep: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Commits of the model that stay in the cache, the last ones, beside those in use; a fetch removes the
    others. 2 if not given, for a claim that is made; of an existing claim nothing is removed then."""

    @property
    def settings(self) -> dict[str, Any]:
        """Returns what says which volume is meant."""
        return {key: value for key, value in self.dump().items() if key != "keep"}


class ModelSpec(Model):
    """Which model is served."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel=" || ".join(f"self.uri.matches({cel_text(f'^{pattern}$')})" for pattern in _URI_PATTERNS),
            message="uri: expected hf://ORG/MODEL, pvc://CLAIM/PATH, oci://REGISTRY/NAME@sha256:DIGEST#FOLDER"
            " or file:///ABSOLUTE/PATH",
            holds=lambda model: any(re.fullmatch(pattern, model.uri) for pattern in _URI_PATTERNS),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
        ValidationRule(
            cel=f"!self.uri.startsWith('oci://') || self.uri.matches({cel_text(_DIGEST)})",
            message="uri: an image must have a digest, since nodes may hold different weights of one tag; "
            "use oci://REGISTRY/NAME@sha256:DIGEST (`crane digest REGISTRY/NAME:TAG` prints it)",
            holds=lambda model: (
                not model.uri.startswith("oci://") or re.search(_DIGEST, model.uri) is not None
            ),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
        ValidationRule(
            cel="!self.uri.matches('(^|[/#])[.][.](/|$)')",
            message="uri: expected a path without '..'; write it out",
            holds=lambda model: ".." not in re.split("[/#]", model.uri),
            got="%s",
            got_cel=("self.uri",),
            got_values=lambda model: (model.uri,),
        ),
        ValidationRule(
            cel="self.uri.startsWith('hf://') "
            "|| !(has(self.revision) || has(self.tokenSecretRef) || has(self.cache))",
            message="revision, tokenSecretRef and cache are for hf:// models; remove them",
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
    """hf://ORG/MODEL, pvc://CLAIM/PATH, oci://REGISTRY/NAME@sha256:DIGEST#FOLDER (an image's files,
    Kubernetes 1.35 or later; FOLDER may be left out) or file:///ABSOLUTE/PATH on the node."""
    revision: (
        Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None
    ) = None
    """Branch, tag or commit of a hub's model; main if not given. What it means is looked up once."""
    served_name: (
        Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")] | None
    ) = None
    """Name in the OpenAI API; the resource's name if not given."""
    token_secret_ref: TokenReference | None = None
    """Token for a hub; only the pod that fetches the model sees it."""
    cache: ModelCache | None = None
    """Where a hub's model is kept; pods mount it read-only."""
    resources: Resources | None = None
    """Resources of the pod that fetches or reads the model; what they leave out is the installation's."""
    ca_bundle: CaBundle | None = None
    """Authorities that the pods that fetch and serve the model trust besides the system's."""
