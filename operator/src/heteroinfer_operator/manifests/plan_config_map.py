"""The ConfigMap with a plan. Pure."""

from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner


def build_plan_config_map(owner: Owner, plan: Plan) -> dict[str, Any]:
    """Returns the immutable ConfigMap of a plan, which pods read into their environment."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": identity.metadata(
            owner, identity.plan_config_map(owner, plan.hash), {names.LABEL_PLAN: plan.hash}
        ),
        "immutable": True,
        "data": {names.PLAN_KEY: plan.to_json()},
    }
