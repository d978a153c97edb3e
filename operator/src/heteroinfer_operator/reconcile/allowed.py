"""What an installation allows of a spec beyond its schema: vLLM's options, annotations of pods. Pure.

Annotations are read by webhooks and by runtimes, which give pods volumes, devices and other profiles by
them: so those that are known to do no such thing are allowed, and what an installation adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.engine_settings import refused_argument
from heteroinfer_operator.reconcile.allowed_args import find_unlisted

ANNOTATIONS: Final = (
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    "karpenter.sh/do-not-disrupt",
    "kubectl.kubernetes.io/default-container",
    "prometheus.io/",
)
"""Keys, or prefixes that end with a slash. A plain word is its user's own: runtimes' keys have dots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What an installation allows.

    Attributes:
        remote_code: whether a model's own Python code may run in its pods.
        arguments: options of vLLM beside those listed; None allows all.
        annotations: of pods, beside those listed: keys, or prefixes that end with a slash; None allows all.
    """

    remote_code: bool = False
    arguments: tuple[str, ...] | None = ()
    annotations: tuple[str, ...] | None = ()

    def find_forbidden(self, spec: HeteroInferenceSpec) -> PlanError | None:
        """Returns why a spec is refused here, or None if it is not; the model need not be known."""
        return self._forbidden_argument(spec) or self._forbidden_annotation(spec)

    def _forbidden_argument(self, spec: HeteroInferenceSpec) -> PlanError | None:
        refused = refused_argument(spec)
        if refused is not None or self.arguments is None:
            return refused
        found = find_unlisted(spec.engine.args, more=self.arguments, remote_code=self.remote_code)
        if found is None:
            return None
        reason = "RemoteCodeNotAllowed" if found.is_remote_code else "ArgumentNotAllowed"
        return PlanError(str(found), reason=reason)

    def _forbidden_annotation(self, spec: HeteroInferenceSpec) -> PlanError | None:
        for role in spec.roles:
            given = (role.template.annotations if role.template else None) or {}
            found = next((key for key in given if not self._allows(key)), None)
            if found is not None:
                return PlanError(
                    f"roles[{role.name}].template.annotations: got {found}, which is not on the list of "
                    "annotations, since others may act on it: remove it, or have the chart's "
                    "allowedAnnotations name it",
                    reason="AnnotationNotAllowed",
                )
        return None

    def _allows(self, key: str) -> bool:
        is_plain = "/" not in key and "." not in key
        return self.annotations is None or is_plain or _is_listed(key, (*ANNOTATIONS, *self.annotations))


def _is_listed(key: str, allowed: Sequence[str]) -> bool:
    return any(key == entry or (entry.endswith("/") and key.startswith(entry)) for entry in allowed)
