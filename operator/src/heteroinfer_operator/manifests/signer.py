"""Codes on the ConfigMaps that the operator reads back: plans and revision records. Pure.

Many more people may write ConfigMaps than pods and Secrets, and what these ConfigMaps hold decides the next
pods. So each carries a code, made with the operator's key, over its kind, owner, name and content. A code is
of one resource (by uid) and one name: a copy under another name, or for another resource, has none.
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
    """Makes and checks the codes of one resource's objects.

    Attributes:
        key: None in an installation without a key, which makes no codes.
    """

    owner: Owner
    key: RecordKey | None

    @classmethod
    def of(cls, operator_key: bytes | None, owner: Owner) -> "Signer":
        """Makes the signer of a resource."""
        key = None if operator_key is None else RecordKey.of_operator(operator_key)
        return cls(owner=owner, key=key)

    @property
    def fingerprint(self) -> str | None:
        """Text that tells this key from others, or None without a key."""
        return None if self.key is None else self.key.fingerprint

    def sign(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the code to a manifest; without a key the manifest stays as it is."""
        if self.key is None:
            return dict(manifest)
        metadata = manifest["metadata"]
        code = {names.ANNOTATION_CODE: self.key.code(*self._parts(manifest))}
        return {
            **manifest,
            "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **code}},
        }

    def vouches(self, stored: Mapping[str, Any]) -> bool:
        """Checks whether this operator's key made the code of a stored object."""
        code = (stored["metadata"].get("annotations") or {}).get(names.ANNOTATION_CODE)
        return self.key is not None and code is not None and self.key.vouches(code, *self._parts(stored))

    def _parts(self, manifest: Mapping[str, Any]) -> tuple[str, ...]:
        content = json.dumps(manifest.get("data") or {}, sort_keys=True, separators=(",", ":"))
        return manifest["kind"], self.owner.uid, manifest["metadata"]["name"], content
