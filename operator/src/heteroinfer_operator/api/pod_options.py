"""Users, name resolution and devices of a role's pods, as far as a resource may choose them. Pure."""

import ipaddress
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_operator.api.base import ATOMIC, Model, ValidationRule
from heteroinfer_operator.api.pod_fields import ClassName

Id = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Of a user or a group; not 0, which owns the files of nodes."""


class GroupChangePolicy(StrEnum):
    """When the group of a volume's files is set."""

    ALWAYS = "Always"
    ON_ROOT_MISMATCH = "OnRootMismatch"


class TemplateSecurityContext(Model):
    """Whose files the pods can read: the fields given here win over the installation's."""

    run_as_user: Id | None = None
    """User id."""
    run_as_group: Id | None = None
    """Group id."""
    fs_group: Id | None = None
    """Group that volumes get, where their driver can do it."""
    fs_group_change_policy: GroupChangePolicy | None = None
    """When volumes get it."""
    supplemental_groups: Annotated[tuple[Id, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None = (
        None
    )
    """Further groups, such as those of files on NFS."""


class DnsPolicy(StrEnum):
    """Which name servers pods ask; the pods of a group find each other by the cluster's names."""

    CLUSTER_FIRST = "ClusterFirst"
    NONE = "None"


class DnsOption(Model):
    """An option of the resolver, such as ndots."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value, if it has one."""


def _is_address(text: str) -> bool:
    """Checks whether a text is an address as isIP of CEL has it: without a zone, no IPv4 inside of IPv6."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text and getattr(address, "ipv4_mapped", None) is None


class DnsConfig(Model):
    """Name servers and search domains besides those of dnsPolicy."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="!has(self.nameservers) || self.nameservers.all(n, isIP(n))",
            message="nameservers: each must be an IP address; correct it",
            holds=lambda own: all(map(_is_address, own.nameservers or ())),
        ),
    )

    nameservers: Annotated[tuple[Annotated[str, Field(max_length=45)], ...], Field(max_length=3)] | None = (
        None
    )
    """Addresses."""
    searches: Annotated[tuple[ClassName, ...], Field(max_length=6)] | None = None
    """Search domains."""
    options: Annotated[tuple[DnsOption, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None = None
    """Options of the resolver."""


class ResourceClaim(Model):
    """Devices of dynamic resource allocation (DRA) besides the GPUs of deviceResourceName."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            message="give each of resourceClaims either resourceClaimName or resourceClaimTemplateName",
            holds=lambda own: (own.resource_claim_name is None) != (own.resource_claim_template_name is None),
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
    """Name in the pod."""
    resource_claim_name: ClassName | None = None
    """A ResourceClaim of the same namespace, which all pods of the role share."""
    resource_claim_template_name: ClassName | None = None
    """A ResourceClaimTemplate of the same namespace: each pod gets a claim of its own."""
