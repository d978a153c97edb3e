"""The claim that a fetched model is kept in, where the user names none. Pure."""

from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import AccessMode, HeteroInferenceSpec
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner

KIND: Final = "PersistentVolumeClaim"
COMPONENT: Final = "model-cache"


def build_model_claim(spec: HeteroInferenceSpec, owner: Owner) -> dict[str, Any] | None:
    """Returns the claim of this spec, or None if it needs none of its own.

    It is made once: other settings are another claim of another name, since a claim's storage
    class and access mode never change, and its size only where the storage class lets it grow.
    """
    cache = spec.model.cache
    if not identity.is_hub_model(spec) or cache is None or cache.size is None:
        return None
    claim: dict[str, Any] = {
        "accessModes": [(cache.access_mode or AccessMode.READ_WRITE_MANY).value],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class_name is not None:
        claim["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": KIND,
        "metadata": identity.metadata(
            owner, identity.model_claim(owner, cache), {names.LABEL_COMPONENT: COMPONENT}
        ),
        "spec": claim,
    }
