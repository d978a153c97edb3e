"""The PersistentVolumeClaim for a downloaded model, if the user names no claim. Pure."""

from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import AccessMode, HeteroInferenceSpec
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner

KIND: Final = "PersistentVolumeClaim"
COMPONENT: Final = "model-cache"


def build_model_claim(spec: HeteroInferenceSpec, owner: Owner) -> dict[str, Any] | None:
    """Returns the claim for this spec, or None if the spec needs no new claim.

    The operator never changes a claim, because Kubernetes does not allow another storage class or access mode
    for a claim, and a larger size only with some storage classes. So other settings give a new claim with
    another name.
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
