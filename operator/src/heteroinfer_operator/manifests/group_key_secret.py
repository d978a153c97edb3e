"""The Secret that a group's pods have their key from. Pure.

Its name tells which key it holds, so that one that exists is as good as one that is made: the
operator creates Secrets in the namespaces that it serves, and reads, changes and deletes none.
"""

import base64
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.group_key import GroupKey
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef

KIND = "Secret"


def key_of(operator_key: bytes | None, group: GroupRef) -> GroupKey | None:
    """Returns the key of a group, or None where the operator has none of its own."""
    return None if operator_key is None else GroupKey.of_group(operator_key, group.uid)


def build_group_key(group: GroupRef, key: GroupKey) -> dict[str, Any]:
    """Returns the Secret with a group's key; it goes with its resource."""
    return {
        "apiVersion": "v1",
        "kind": KIND,
        "metadata": identity.group_metadata(group, group_key_secret(group, key)),
        "immutable": True,
        "data": {names.GROUP_KEY_KEY: base64.b64encode(key.text.encode()).decode()},
    }


def build_key_variable(group: GroupRef, key: GroupKey) -> dict[str, Any]:
    """Returns the environment variable by which a pod gets its group's key."""
    reference = {"name": group_key_secret(group, key), "key": names.GROUP_KEY_KEY}
    return {"name": names.ENV_GROUP_KEY, "valueFrom": {"secretKeyRef": reference}}


def group_key_secret(group: GroupRef, key: GroupKey) -> str:
    """Returns the name of the Secret of a group's key: another key has another one."""
    return f"{group.owner.key.name}-{group.index}-key-{key.fingerprint}"
