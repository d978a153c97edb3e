"""What an installation allows of a spec beyond its schema: options, annotations, images, host paths. Pure.

Annotations are read by webhooks and by runtimes, which give pods volumes, devices and other profiles by
them: so those that are known to do no such thing are allowed, and what an installation adds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests.addressing import HOST_PATH_REASON
from heteroinfer_operator.planning.engine_settings import refused_arguments
from heteroinfer_operator.reconcile.allowed_args import find_unlisted

ANNOTATIONS: Final = (
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    "karpenter.sh/do-not-disrupt",
    "kubectl.kubernetes.io/default-container",
    "prometheus.io/",
)
"""Keys, or prefixes that end with a slash. A plain word is its user's own: runtimes' keys have dots."""

_IMAGE_ENDS: Final = ("/", ":", "@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What an installation allows.

    Attributes:
        remote_code: whether a model's own Python code may run in its pods.
        arguments: options of vLLM beside those listed; None allows all but weight offloading.
        annotations: of pods, beside those listed: keys, or prefixes that end with a slash; None allows all.
        images: what `engine.image` may name: images, or prefixes that end with / : or @; empty allows all.
        host_paths: folders in which a path of a node may lie; empty allows all.
        service_accounts: names that pods may have, in any namespace; None allows all.
    """

    remote_code: bool = False
    arguments: tuple[str, ...] | None = ()
    annotations: tuple[str, ...] | None = ()
    images: tuple[str, ...] = ()
    host_paths: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] | None = ()

    def find_forbidden(self, spec: HeteroInferenceSpec) -> PlanError | None:
        """Returns the first reason why a spec is refused here, or None; the model need not be known."""
        return next(self.find_all_forbidden(spec), None)

    def find_all_forbidden(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        """Finds each argument, annotation, image and path of a node that is refused here."""
        yield from self.forbidden_arguments(spec.engine.args)
        yield from self._forbidden_annotations(spec)
        yield from self._forbidden_places(spec)
        yield from self._forbidden_accounts(spec)

    def forbidden_arguments(self, args: Sequence[str]) -> Iterator[PlanError]:
        """Finds those of these arguments for vLLM that are refused here."""
        yield from refused_arguments(args)
        yield from find_unlisted(args, more=self.arguments, remote_code=self.remote_code)

    def _forbidden_annotations(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        for role in spec.roles:
            for key in (role.template.annotations if role.template else None) or {}:
                if not self._allows(key):
                    yield PlanError(
                        f"roles[{role.name}].template.annotations: got {key}, which is not on the list of "
                        "annotations, since others may act on it: remove it, or have the chart's "
                        "allowedAnnotations name it",
                        reason="AnnotationNotAllowed",
                    )

    def _forbidden_places(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        image, listed = spec.engine.image, ", ".join(self.images)
        if image and self.images and not _is_listed(image, self.images, ends=_IMAGE_ENDS):
            yield PlanError(
                f"engine.image: got {image}, expected one of {listed}: take such an image, or have "
                "the chart's allowedWorkerImages name it",
                reason="ImageNotAllowed",
            )
        scheme, _, path = spec.model.uri.partition("://")
        folders = self.host_paths
        if scheme == "file" and folders and not any(_is_below(path, folder) for folder in folders):
            yield PlanError(
                f"model.uri: got the path {path} of a node, expected one in {', '.join(folders)}: move "
                "the model, or have the chart's allowedHostPaths name its folder",
                reason=HOST_PATH_REASON,
            )

    def _forbidden_accounts(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        """Finds service accounts that are not listed.

        The pods get no token of theirs. But webhooks of clouds give pods the rights of an account by its
        name, and admission allows pods more by it: who creates this resource need not have those rights.
        """
        for role in spec.roles:
            name = role.template.service_account_name if role.template else None
            allowed = self.service_accounts
            if name is not None and allowed is not None and name not in allowed:
                yield PlanError(
                    f"roles[{role.name}].template.serviceAccountName: got {name}, which is not on the list "
                    "of service accounts, since clouds give pods rights by it: remove it, or have the "
                    "chart's allowedServiceAccounts name it",
                    reason="ServiceAccountNotAllowed",
                )

    def _allows(self, key: str) -> bool:
        is_plain = "/" not in key and "." not in key
        return self.annotations is None or is_plain or _is_listed(key, (*ANNOTATIONS, *self.annotations))


def _is_listed(key: str, allowed: Sequence[str], *, ends: tuple[str, ...] = ("/",)) -> bool:
    return any(key == entry or (entry.endswith(ends) and key.startswith(entry)) for entry in allowed)


def _is_below(path: str, folder: str) -> bool:
    """Returns whether a path is a folder or in it; the schema refuses paths that go up."""
    wanted = PurePosixPath(folder).parts
    return PurePosixPath(path).parts[: len(wanted)] == wanted
