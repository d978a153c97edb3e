"""User ids, DNS settings and devices that a resource may set on a role's pods. Pure."""

import ipaddress
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_operator.api.base import ATOMIC, Model, ValidationRule
from heteroinfer_operator.api.pod_fields import ClassName

Id = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Id of a user or a group; not 0, because root owns the files of nodes."""


class GroupChangePolicy(StrEnum):
    """When Kubernetes changes the group of a volume's files."""

    ALWAYS = "Always"
    ON_ROOT_MISMATCH = "OnRootMismatch"


class TemplateSecurityContext(Model):
    """User and groups of the pods.

    Each field overrides the same field of the chart's workerPods.podSecurityContext.
    """

    run_as_user: Id | None = None
    """User id of the processes. Default: from the chart's workerPods.podSecurityContext."""
    run_as_group: Id | None = None
    """Group id of the processes. Default: from the chart's workerPods.podSecurityContext."""
    fs_group: Id | None = None
    """Group id of the files in volumes, if the volume's driver supports it. Default: from the chart's
    workerPods.podSecurityContext."""
    fs_group_change_policy: GroupChangePolicy | None = None
    """When the node changes the group of the files in a volume. Always: each time the node mounts the volume.
    OnRootMismatch: only if the volume's root folder has another group. Default: from the chart's
    workerPods.podSecurityContext."""
    supplemental_groups: Annotated[tuple[Id, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None = (
        None
    )
    """Further group ids of the processes, such as the group of files on NFS. Default: from the chart's
    workerPods.podSecurityContext."""


class DnsPolicy(StrEnum):
    """Name servers of the pods.

    The pods of a group find each other by the cluster's DNS names. So the policies of Kubernetes that use the
    node's name servers are not allowed.
    """

    CLUSTER_FIRST = "ClusterFirst"
    NONE = "None"


class DnsOption(Model):
    """An option of the DNS resolver, such as ndots."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the option."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the option. Default: none."""


def _is_address(text: str) -> bool:
    """Reports whether a text is an IP address by the rules of CEL's isIP.

    isIP refuses addresses with a zone, such as fe80::1%eth0, and IPv4 addresses inside IPv6.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text and getattr(address, "ipv4_mapped", None) is None


class DnsConfig(Model):
    """DNS settings in addition to those of dnsPolicy."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="nameservers",
            cel="!has(self.nameservers) || self.nameservers.all(n, isIP(n))",
            message="each entry must be an IP address",
            holds=lambda config: all(map(_is_address, config.nameservers or ())),
        ),
    )

    nameservers: Annotated[tuple[Annotated[str, Field(max_length=45)], ...], Field(max_length=3)] | None = (
        None
    )
    """IP addresses of further name servers. Default: none."""
    searches: Annotated[tuple[ClassName, ...], Field(max_length=6)] | None = None
    """Further search domains for host names. Default: none."""
    options: Annotated[tuple[DnsOption, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None = None
    """Options of the DNS resolver. Default: none."""


class ResourceClaim(Model):
    """Devices by dynamic resource allocation (DRA), in addition to the GPUs of deviceResourceName."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            message="must set either resourceClaimName or resourceClaimTemplateName",
            holds=lambda claim: (
                (claim.resource_claim_name is None) != (claim.resource_claim_template_name is None)
            ),
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
    """Name of the claim inside the pod."""
    resource_claim_name: ClassName | None = None
    """Name of a ResourceClaim in the same namespace, which all pods of the role share."""
    resource_claim_template_name: ClassName | None = None
    """Name of a ResourceClaimTemplate in the same namespace, from which each pod gets its own claim."""
