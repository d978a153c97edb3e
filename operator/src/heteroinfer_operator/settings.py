"""Settings of the operator, read from the environment once.

The chart sets these variables, except HETEROINFER_RESYNC_SECONDS and HETEROINFER_WATCH_SILENCE_SECONDS. Only
this module and the chart contain their names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.errors import HeteroInferError

_ANNOTATION: Final = re.compile(r"[a-z0-9.-]{1,253}/[A-Za-z0-9._-]{0,63}|[A-Za-z0-9._-]{1,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
_OPTION: Final = re.compile(r"--[a-z0-9][a-z0-9-]*")
_ACCOUNT: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE: Final = re.compile(r"\S+")
_PATH: Final = re.compile(r"/\S*")
_SECRET: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationSettings:
    """Settings of an installation.

    `tests/settings_page.py` writes the page of the variables from this docstring.

    Attributes:
        watch_namespaces: HETEROINFER_WATCH_NAMESPACES: list of namespaces to serve. Empty: all namespaces,
            and plans use the capacity of nodes.
        operator_class: HETEROINFER_OPERATOR_CLASS: `spec.operatorClass` of the served resources. Empty:
            resources without a class.
        worker_image_cpu: HETEROINFER_WORKER_IMAGE_CPU: default image of CPU pods.
        worker_image_gpu: HETEROINFER_WORKER_IMAGE_GPU: default image of GPU pods.
        worker_pull_policy: HETEROINFER_WORKER_PULL_POLICY: pull policy of the images of workers. Empty:
            Kubernetes' default.
        worker_pull_secrets: HETEROINFER_WORKER_PULL_SECRETS: list of pull secrets in the pod's namespace, in
            addition to those of the resource.
        allowed_worker_images: HETEROINFER_ALLOWED_WORKER_IMAGES: list of images that `engine.image` may name,
            or of prefixes that end with / : or @. Empty: all images.
        allowed_host_paths: HETEROINFER_ALLOWED_HOST_PATHS: list of folders that `file://` may use. Empty: all
            folders.
        allow_host_paths: HETEROINFER_ALLOW_HOST_PATHS: whether `file://` may mount a path of the node.
        allow_remote_code: HETEROINFER_ALLOW_REMOTE_CODE: whether `engine.args` may contain
            `--trust-remote-code`.
        allowed_arguments: HETEROINFER_ALLOWED_ARGUMENTS: list of vLLM options that `engine.args` may contain
            in addition to those that are always allowed.
        allowed_environment: HETEROINFER_ALLOWED_ENVIRONMENT: list of variables that `engine.env` may set in
            addition to those that are always allowed, or of prefixes that end with `*`.
        allowed_annotations: HETEROINFER_ALLOWED_ANNOTATIONS: list of annotation keys that pods may have in
            addition to those that are always allowed, or of prefixes that end with a slash.
        pod_resources: HETEROINFER_POD_RESOURCES: JSON with requests and limits of the pods that fetch and
            read models, and defaults for roles. Empty: built-in defaults.
        allowed_service_accounts: HETEROINFER_ALLOWED_SERVICE_ACCOUNTS: list of service accounts that pods may
            use.
        http_port: HETEROINFER_HTTP_PORT: port of /healthz, /readyz and /metrics. 0: any free port.
        workers: HETEROINFER_WORKERS: number of resources to reconcile at the same time. A reconcile that
            takes longer than 0.25 s (SLOW_S of the work queue) no longer counts.
        resync_s: HETEROINFER_RESYNC_SECONDS: seconds between resyncs.
        watch_silence_s: HETEROINFER_WATCH_SILENCE_SECONDS: the operator starts a watch again after this
            number of seconds without data. Use more than 60, because the API server sends a bookmark every
            minute.
        pod_egress: HETEROINFER_POD_EGRESS: when the operator adds NetworkPolicies that let pods reach their
            group, DNS and the hub. Auto: if other policies isolate these pods.
        fetch_egress: HETEROINFER_FETCH_EGRESS: JSON with the `ports` and `cidrs` that these policies open to
            pods that fetch a model, without those in `except`. Empty: built-in defaults.
        leader_election: HETEROINFER_LEADER_ELECTION: whether the operator works only while it
            holds the Lease.
        lease_name: HETEROINFER_LEASE_NAME: name of the Lease.
        lease_duration_s: HETEROINFER_LEASE_SECONDS: another process takes the Lease after this number of
            seconds without a renewal.
        key_secret: HETEROINFER_KEY_SECRET: name of the Secret with the operator's key, in the operator's
            namespace. Empty: groups start without keys, and only the network protects their ports.
        former_key_secret: HETEROINFER_FORMER_KEY_SECRET: name of the Secret in which charts before 0.2.0 kept
            the operator's key. Empty: none.
        calibration_config_map: HETEROINFER_CALIBRATION_CONFIG_MAP: name of the ConfigMap with the measured
            rates of nodes, in the operator's namespace. Empty: default rates for all nodes.
        namespace: HETEROINFER_NAMESPACE: namespace of the operator, its Lease, key and calibrations.
        identity: HETEROINFER_IDENTITY: name of this replica, which holds the Lease.
        log_level: HETEROINFER_LOG_LEVEL: lowest level of the messages that the log contains.
        pod_security: HETEROINFER_POD_SECURITY: JSON with security contexts (pod, container) of workers and of
            pods that fetch or read a model. Empty: a fixed user id.
        log_format: HETEROINFER_LOG_FORMAT: form of the log. json: one object per line.
    """

    watch_namespaces: tuple[str, ...] = ()
    operator_class: str = ""
    worker_image_cpu: str = ""
    worker_image_gpu: str = ""
    worker_pull_policy: str = ""
    worker_pull_secrets: tuple[str, ...] = ()
    allowed_worker_images: tuple[str, ...] = ()
    allowed_host_paths: tuple[str, ...] = ()
    allow_host_paths: bool = False
    allow_remote_code: bool = False
    allowed_arguments: tuple[str, ...] = ()
    allowed_environment: tuple[str, ...] = ()
    allowed_annotations: tuple[str, ...] = ()
    pod_resources: str = ""
    allowed_service_accounts: tuple[str, ...] = ()
    http_port: int = 8080
    workers: int = 6
    resync_s: float = 300.0
    watch_silence_s: float = 100.0
    pod_egress: str = "Auto"
    fetch_egress: str = ""
    leader_election: bool = False
    lease_name: str = "heteroinfer-operator"
    lease_duration_s: int = 15
    key_secret: str = ""
    former_key_secret: str = ""
    calibration_config_map: str = ""
    namespace: str = ""
    identity: str = ""
    log_level: str = "INFO"
    pod_security: str = ""
    log_format: str = "text"

    @property
    def lease_renew_s(self) -> float:
        """Interval of renewals, in seconds."""
        return self.lease_duration_s / 5

    @property
    def lease_deadline_s(self) -> float:
        """Seconds without a renewal after which this process exits.

        Less than the duration, so that this process has stopped before another process starts.
        """
        return self.lease_duration_s * 2 / 3

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "InstallationSettings":
        """Reads the settings from environment variables.

        Raises:
            HeteroInferError: a variable has an invalid value. The message names the variable.
        """
        read = _EnvReader(env)
        settings = cls(
            watch_namespaces=read.names("WATCH_NAMESPACES", _NAMESPACE, "names of namespaces"),
            operator_class=read.name("OPERATOR_CLASS"),
            worker_image_cpu=read.text("WORKER_IMAGE_CPU", ""),
            worker_image_gpu=read.text("WORKER_IMAGE_GPU", ""),
            worker_pull_policy=read.choice("WORKER_PULL_POLICY", ("", "Always", "IfNotPresent", "Never")),
            worker_pull_secrets=read.names("WORKER_PULL_SECRETS", _SECRET, "names of Secrets"),
            allowed_worker_images=read.names("ALLOWED_WORKER_IMAGES", _IMAGE, "images or prefixes of images"),
            allowed_host_paths=read.names("ALLOWED_HOST_PATHS", _PATH, "absolute paths"),
            allow_host_paths=read.flag("ALLOW_HOST_PATHS", default=False),
            allow_remote_code=read.flag("ALLOW_REMOTE_CODE", default=False),
            allowed_arguments=read.names("ALLOWED_ARGUMENTS", _OPTION, "options such as --runner"),
            allowed_environment=read.names(
                "ALLOWED_ENVIRONMENT", _VARIABLE, "names of variables, or prefixes that end with *"
            ),
            allowed_annotations=read.names(
                "ALLOWED_ANNOTATIONS", _ANNOTATION, "keys of annotations, or prefixes that end with a slash"
            ),
            pod_resources=read.text("POD_RESOURCES", ""),
            allowed_service_accounts=read.names(
                "ALLOWED_SERVICE_ACCOUNTS", _ACCOUNT, "names of service accounts"
            ),
            http_port=read.number("HTTP_PORT", 8080, least=0, most=65535),
            workers=read.number("WORKERS", 6, least=1, most=64),
            resync_s=read.number("RESYNC_SECONDS", 300, least=1, most=86400),
            watch_silence_s=read.number("WATCH_SILENCE_SECONDS", 100, least=1, most=3600),
            pod_egress=read.choice("POD_EGRESS", ("Auto", "Always", "Never")),
            fetch_egress=read.text("FETCH_EGRESS", ""),
            leader_election=read.flag("LEADER_ELECTION", default=False),
            lease_name=read.text("LEASE_NAME", "heteroinfer-operator"),
            lease_duration_s=read.number("LEASE_SECONDS", 15, least=3, most=3600),
            key_secret=read.text("KEY_SECRET", ""),
            former_key_secret=read.text("FORMER_KEY_SECRET", ""),
            calibration_config_map=read.text("CALIBRATION_CONFIG_MAP", ""),
            namespace=read.text("NAMESPACE", ""),
            identity=read.text("IDENTITY", ""),
            log_level=read.choice("LOG_LEVEL", ("INFO", "DEBUG", "WARNING", "ERROR")),
            pod_security=read.text("POD_SECURITY", ""),
            log_format=read.choice("LOG_FORMAT", ("text", "json")),
        )
        settings._check_combinations()
        return settings

    def _check_combinations(self) -> None:
        """Raises HeteroInferError if a setting needs another setting that is empty."""
        if self.key_secret and not self.namespace:
            raise _settings_error(
                "HETEROINFER_KEY_SECRET is set, but HETEROINFER_NAMESPACE is not. Set HETEROINFER_NAMESPACE "
                "to the operator's namespace"
            )
        if self.calibration_config_map and not self.namespace:
            raise _settings_error(
                "HETEROINFER_CALIBRATION_CONFIG_MAP is set, but HETEROINFER_NAMESPACE is not. Set "
                "HETEROINFER_NAMESPACE to the operator's namespace"
            )
        if self.leader_election and not (self.namespace and self.identity):
            raise _settings_error(
                "HETEROINFER_LEADER_ELECTION is true, but HETEROINFER_NAMESPACE or HETEROINFER_IDENTITY "
                "is not set. Set them to the namespace and to the name of the operator's pod"
            )


class _EnvReader:
    """Reads and checks variables by their names without the prefix HETEROINFER_."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str, default: str) -> str:
        return self._env.get(f"HETEROINFER_{name}", "").strip() or default

    def name(self, name: str) -> str:
        """Returns a DNS label, or "" if the variable is not set."""
        text = self.text(name, "")
        if text and not _NAMESPACE.fullmatch(text):
            raise _wrong_value(name, text, "at most 63 lower-case letters, digits and -")
        return text

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a setting that is true or false."""
        text = self.text(name, "true" if default else "false").lower()
        if text not in {"true", "false"}:
            raise _wrong_value(name, text, "true or false")
        return text == "true"

    def number(self, name: str, default: int, *, least: int, most: int) -> int:
        """Returns a setting that is a whole number from `least` to `most`."""
        text = self.text(name, str(default))
        if not text.isdecimal() or not least <= int(text) <= most:
            raise _wrong_value(name, text, f"a whole number from {least} to {most}")
        return int(text)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Returns one of the choices, ignoring case; the first choice if the variable is not set."""
        text = self.text(name, choices[0])
        matching = next((choice for choice in choices if choice.lower() == text.lower()), None)
        if matching is None:
            raise _wrong_value(name, text, f"one of {', '.join(filter(None, choices))}")
        return matching

    def names(self, name: str, pattern: re.Pattern[str], expected: str) -> tuple[str, ...]:
        """Returns the items of a list that is separated by commas, sorted."""
        items = {part.strip() for part in self.text(name, "").split(",") if part.strip()}
        for part in sorted(items):
            if not pattern.fullmatch(part):
                raise _wrong_value(name, part, f"{expected}, separated by commas")
        return tuple(sorted(items))


def _wrong_value(name: str, got: str, expected: str) -> HeteroInferError:
    return _settings_error(f"HETEROINFER_{name} must be {expected} (got {got!r})")


def _settings_error(message: str) -> HeteroInferError:
    return HeteroInferError(message, reason=FailureReason.BAD_SETTINGS.value)
