"""The Secret with the key of a group's pods. Pure.

The Secret's name identifies the key, so the operator can use an existing Secret without reading it. In the
namespaces of resources, the operator creates Secrets, but never reads, changes or deletes them.
"""

import base64
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.group_key import GroupKey
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef

KIND = "Secret"


def derive_group_key(operator_key: bytes | None, group: GroupRef) -> GroupKey | None:
    """Returns the key of a group, derived from the operator's key; None if the operator has no key."""
    return None if operator_key is None else GroupKey.of_group(operator_key, group.uid)


def build_group_key_secret(group: GroupRef, key: GroupKey) -> dict[str, Any]:
    """Returns the Secret with a group's key. Garbage collection deletes it with the resource."""
    return {
        "apiVersion": "v1",
        "kind": KIND,
        "metadata": identity.group_metadata(group, group_key_secret_name(group, key)),
        "immutable": True,
        "data": {names.GROUP_KEY_KEY: base64.b64encode(key.text.encode()).decode()},
    }


def build_key_variable(group: GroupRef, key: GroupKey) -> dict[str, Any]:
    """Returns the environment variable that the kubelet fills with the group's key from its Secret."""
    reference = {"name": group_key_secret_name(group, key), "key": names.GROUP_KEY_KEY}
    return {"name": names.ENV_GROUP_KEY, "valueFrom": {"secretKeyRef": reference}}


def group_key_secret_name(group: GroupRef, key: GroupKey) -> str:
    """Returns the name of the Secret of a group's key, which contains the key's fingerprint."""
    return f"{group.owner.key.name}-{group.index}-key-{key.fingerprint}"
