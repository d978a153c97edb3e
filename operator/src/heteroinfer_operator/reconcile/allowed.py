"""Restrictions of an installation on options, variables, annotations, images, host paths, accounts. Pure.

Webhooks and container runtimes act on annotations: they may give a pod volumes, devices or security profiles.
So an installation allows only annotations without such an effect, and those that its administrator adds.
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
from heteroinfer_operator.reconcile.allowed_env import find_unlisted_env

ANNOTATIONS: Final = (
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    "karpenter.sh/do-not-disrupt",
    "kubectl.kubernetes.io/default-container",
    "prometheus.io/",
)
"""Allowed keys of annotations, or prefixes that end with a slash.

Keys without dots and slashes are allowed too, because the keys that runtimes read have dots.
"""

_IMAGE_ENDS: Final = ("/", ":", "@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The permissions that an installation grants to specs.

    Attributes:
        remote_code: whether a model's own Python code may run in its pods.
        arguments: options of vLLM in addition to allowed_args.py; None allows all but weight offloading.
        environment: environment variables in addition to allowed_env.py: names, or prefixes that end with
            `*`; None allows all.
        annotations: annotations of pods in addition to ANNOTATIONS: keys, or prefixes that end with a
            slash; None allows all.
        images: images for `engine.image` and image volumes: names, or prefixes that end with / : or @;
            empty allows all.
        host_paths: folders of nodes that may contain models; empty allows all.
        service_accounts: names of service accounts for pods, in any namespace; None allows all.
    """

    remote_code: bool = False
    arguments: tuple[str, ...] | None = ()
    environment: tuple[str, ...] | None = ()
    annotations: tuple[str, ...] | None = ()
    images: tuple[str, ...] = ()
    host_paths: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] | None = ()

    def find_forbidden(self, spec: HeteroInferenceSpec) -> PlanError | None:
        """Returns the error for the first part of a spec that is not allowed, or None."""
        return next(self.find_all_forbidden(spec), None)

    def find_all_forbidden(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        """Yields an error for each part of a spec that this installation does not allow."""
        yield from self.find_forbidden_arguments(spec.engine.args)
        if self.environment is not None:  # None allows all
            yield from find_unlisted_env(spec.engine.env, self.environment)
        yield from self._find_forbidden_annotations(spec)
        yield from self._find_forbidden_images_and_paths(spec)
        yield from self._find_forbidden_accounts(spec)

    def find_forbidden_arguments(self, args: Sequence[str]) -> Iterator[PlanError]:
        """Yields an error for each vLLM argument that this installation refuses."""
        yield from refused_arguments(args)
        yield from find_unlisted(args, more=self.arguments, remote_code=self.remote_code)

    def _find_forbidden_annotations(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        """Yields an error for each annotation of a role that is not allowed."""
        for role in spec.roles:
            for key in (role.template.annotations if role.template else None) or {}:
                if not self._allows_annotation(key):
                    yield PlanError(
                        f"roles[{role.name}].template.annotations: {key} is not an allowed annotation "
                        "(webhooks or container runtimes may act on it). Remove it, or add it to the chart's "
                        "allowedAnnotations",
                        reason="AnnotationNotAllowed",
                    )

    def _find_forbidden_images_and_paths(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        """Yields an error for each image that is not allowed, and for a node path that is not allowed."""
        for field, image in _images_of_pods(spec):
            if self.images and not _matches_entry(image, self.images, prefix_ends=_IMAGE_ENDS):
                yield PlanError(
                    f"{field}: image {image} must match one of {', '.join(self.images)}. Use such an image, "
                    "or add this image to the chart's allowedWorkerImages",
                    reason="ImageNotAllowed",
                )
        scheme, _, path = spec.model.uri.partition("://")
        folders = self.host_paths
        if scheme == "file" and folders and not any(_is_below(path, folder) for folder in folders):
            yield PlanError(
                f"model.uri: node path {path} must be in {', '.join(folders)}. Move the model, or add its "
                "folder to the chart's allowedHostPaths",
                reason=HOST_PATH_REASON,
            )

    def _find_forbidden_accounts(self, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
        """Yields an error for each service account that is not allowed.

        The pods get no token of the account. But cloud providers and admission webhooks grant rights to pods
        by the name of their account. Perhaps the user who creates this resource does not have these rights.
        """
        for role in spec.roles:
            name = role.template.service_account_name if role.template else None
            allowed = self.service_accounts
            if name is not None and allowed is not None and name not in allowed:
                yield PlanError(
                    f"roles[{role.name}].template.serviceAccountName: {name} is not an allowed service "
                    "account (cloud providers grant pods rights by this name). Remove it, or add it to the "
                    "chart's allowedServiceAccounts",
                    reason="ServiceAccountNotAllowed",
                )

    def _allows_annotation(self, key: str) -> bool:
        """Reports whether pods may have an annotation with this key."""
        is_plain = "/" not in key and "." not in key  # no runtime reads such a key
        return self.annotations is None or is_plain or _matches_entry(key, (*ANNOTATIONS, *self.annotations))


def _images_of_pods(spec: HeteroInferenceSpec) -> Iterator[tuple[str, str]]:
    """Yields the field and the name of each image that pods run or mount.

    Leaves out the image of a model, because it contains weights instead of code.
    """
    if spec.engine.image:
        yield "engine.image", spec.engine.image
    for role in spec.roles:
        for volume in role.template.volumes if role.template else ():
            if volume.image is not None:
                field = f"roles[{role.name}].template.volumes[{volume.name}].image.reference"
                yield field, volume.image.reference


def _matches_entry(key: str, allowed: Sequence[str], *, prefix_ends: tuple[str, ...] = ("/",)) -> bool:
    """Reports whether a key is in a list. An entry that ends with one of `prefix_ends` is a prefix."""
    return any(key == entry or (entry.endswith(prefix_ends) and key.startswith(entry)) for entry in allowed)


def _is_below(path: str, folder: str) -> bool:
    """Reports whether a path is this folder or inside it; the schema refuses paths with ".."."""
    folder_parts = PurePosixPath(folder).parts
    return PurePosixPath(path).parts[: len(folder_parts)] == folder_parts
