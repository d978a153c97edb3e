"""Error messages about a hub, without tokens. Stdlib and the contract only; pure."""

import re
from dataclasses import dataclass, field
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import HUB_SCHEME
from vllm_heteroinfer.fetch.errors import FetchError

_BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_QUERY: Final = re.compile(r"\?[^\s'\"]*")
"""The query of a URL. In a URL of a content network it holds a signature, which grants access for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedHub:
    """A hub and the revision of a model to request from the hub.

    Attributes:
        token: sent with each request; "" for none.
        give_a_token: message that explains how to set a token.
        environment: " in" and the field where users set the hub's variables, or "".
        trust: message that explains how to trust another certificate authority.
    """

    endpoint: str
    repository: str
    revision: str
    token: str = field(repr=False)
    give_a_token: str
    environment: str = ""
    trust: str = "export SSL_CERT_FILE with the certificates to trust"

    @property
    def model(self) -> str:
        """The model as users write it: hf://ORG/MODEL."""
        return f"{HUB_SCHEME}{self.repository}"

    def refusal(self, status: int, code: str, said: str = "") -> FetchError:
        """Builds the error for an answer with an HTTP error status.

        Args:
            status: the HTTP status.
            code: the hub's header X-Error-Code, or "".
            said: the answer's message for people, or "".
        """
        answers = f"answers {status} for {self.model}{said and ': '}{said}"
        if status in _BUSY:
            return self.unavailable(answers)
        reason, what = FailureReason.MODEL_NOT_FOUND, f"{self.endpoint} {answers}"
        if code == "GatedRepo":
            reason = FailureReason.MODEL_ACCESS_DENIED
            page = f"{self.endpoint}/{self.repository}"
            what = f"{self.model} is gated: accept its licence at {page} with the account of the token"
            what += "" if self.token else f", and {self.give_a_token}"
        elif code == "RevisionNotFound":
            what = f"{self.model} has no revision {self.revision} at {self.endpoint}: correct "
            what += "spec.model.revision"
        elif code == "RepoNotFound" or (status == 401 and not self.token):
            readable = "it must be readable with the token that is set" if self.token else self.give_a_token
            what = f"{self.endpoint} shows no model {self.repository}: correct spec.model.uri; "
            what += f"if it is private, {readable}"
        elif status in (401, 403):
            reason = FailureReason.MODEL_ACCESS_DENIED
            what += f"; {'check the token, or ' if self.token else ''}{self.give_a_token}"
        return FetchError(reason, what)

    def silence(self, error: Exception) -> FetchError:
        """Builds the error for a connection that failed or ended early."""
        return self.unavailable(f"does not answer ({type(error).__name__}: {self.clean(error)})")

    def untrusted_certificate(self, error: Exception) -> FetchError:
        """Builds the error for an untrusted certificate of the hub or of a proxy."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{self.endpoint} has a certificate of an authority that is not trusted here: "
            f"{self.clean(error)}. To trust the authority, {self.trust}",
        )

    def unavailable(self, what: str) -> FetchError:
        """Builds the error for a hub that may answer later."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{self.endpoint} {what}; check the network, and HTTPS_PROXY or HF_ENDPOINT{self.environment}",
            may_heal=True,
        )

    def no_hub(self, why: str) -> FetchError:
        """Builds the error for a server that does not behave like a hub."""
        said = f"does not answer like a model hub: {why}. Check HF_ENDPOINT{self.environment}"
        return FetchError(FailureReason.MODEL_HUB_UNREACHABLE, f"{self.endpoint} {said}")

    def offline(self) -> FetchError:
        """Builds the error for offline mode."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{names.ENV_HUB_OFFLINE} forbids requests to {self.endpoint} for {self.model}. Unset it",
        )

    def clean(self, words: object) -> str:
        """Returns a client's message on one line, without the token and without queries of URLs."""
        text = _QUERY.sub("", " ".join(str(words).split())) or "no details"
        return (text.replace(self.token, "***") if self.token else text)[:300]
