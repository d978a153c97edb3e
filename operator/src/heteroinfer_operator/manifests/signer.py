"""Authentication codes of the ConfigMaps that the operator reads back: plans and revision records. Pure.

More users may write ConfigMaps than pods and Secrets, but the next pods of a group are created from these
ConfigMaps. So each ConfigMap has an authentication code, which the operator computes with its key from kind,
owner, name and content. The code is valid only for one resource (by uid) and one name: a copy under another
name, or for another resource, is not valid.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.group_key import RecordKey
from heteroinfer_operator.manifests.identity import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Computes and checks the authentication codes of a resource's objects.

    Attributes:
        key: None in an installation without a key, which uses no codes.
    """

    owner: Owner
    key: RecordKey | None

    @classmethod
    def for_owner(cls, operator_key: bytes | None, owner: Owner) -> "Signer":
        """Returns the signer for a resource."""
        key = None if operator_key is None else RecordKey.of_operator(operator_key)
        return cls(owner=owner, key=key)

    @property
    def fingerprint(self) -> str | None:
        """Text that identifies the key, or None without a key."""
        return None if self.key is None else self.key.fingerprint

    def sign(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the manifest with its authentication code in an annotation; unchanged without a key.

        Content that another user writes later does not match the code (`is_signed_by_us`).
        """
        if self.key is None:
            return dict(manifest)
        metadata = manifest["metadata"]
        code = {names.ANNOTATION_CODE: self.key.code(*self._signed_parts(manifest))}
        return {
            **manifest,
            "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **code}},
        }

    def is_signed_by_us(self, stored: Mapping[str, Any]) -> bool:
        """Reports whether the authentication code of a stored object is valid for this operator's key."""
        code = (stored["metadata"].get("annotations") or {}).get(names.ANNOTATION_CODE)
        return (
            self.key is not None and code is not None and self.key.verifies(code, *self._signed_parts(stored))
        )

    def _signed_parts(self, manifest: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the parts of an object that its code covers: kind, owner, name and content."""
        content = json.dumps(manifest.get("data") or {}, sort_keys=True, separators=(",", ":"))
        return manifest["kind"], self.owner.uid, manifest["metadata"]["name"], content
