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
"""The query of a URL. In URLs of content networks, the query contains a signature that grants access."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedHub:
    """A hub, the model that a fetch requests from it, and the fixes for error messages.

    Attributes:
        token: sent with each request; "" for none.
        fix_for_token: instruction that sets a token, such as "set HF_TOKEN to a token".
        variables_field: " in" and the field where users set the hub's variables; "" without such a field.
        fix_for_certificates: instruction that makes this process trust another certificate authority.
    """

    endpoint: str
    repository: str
    revision: str
    token: str = field(repr=False)
    fix_for_token: str
    variables_field: str = ""
    fix_for_certificates: str = "export SSL_CERT_FILE with the certificates to trust"

    @property
    def model(self) -> str:
        """The model as users write it: hf://ORG/MODEL."""
        return f"{HUB_SCHEME}{self.repository}"

    def refusal_error(self, status: int, code: str, answer_message: str = "") -> FetchError:
        """Builds the error for an answer with an HTTP error status.

        A busy hub may answer later. Otherwise the hub's code decides about reason and fix, or else the
        status.

        Args:
            status: the HTTP status.
            code: the hub's header X-Error-Code, or "".
            answer_message: the answer's message for people, or "".
        """
        details = f": {answer_message}" if answer_message else ""
        problem = f"answers {status} for {self.model}{details}"
        if status in _BUSY:
            return self.unavailable_error(problem)
        reason, message = FailureReason.MODEL_NOT_FOUND, f"{self.endpoint} {problem}"
        if code == "GatedRepo":
            reason = FailureReason.MODEL_ACCESS_DENIED
            page = f"{self.endpoint}/{self.repository}"
            message = f"{self.model} is gated. Accept its licence at {page} with the account of the token"
            if not self.token:
                message += f", and {self.fix_for_token}"
        elif code == "RevisionNotFound":
            message = f"{self.model} has no revision {self.revision} at {self.endpoint}. Correct "
            message += "spec.model.revision"
        elif code == "RepoNotFound" or (status == 401 and not self.token):
            use_token = "use a token that can read it" if self.token else self.fix_for_token
            message = f"{self.endpoint} shows no model {self.repository}. Correct spec.model.uri. "
            message += f"If the model is private, {use_token}"
        elif status in (401, 403):
            reason = FailureReason.MODEL_ACCESS_DENIED
            fix = f"{'check the token, or ' if self.token else ''}{self.fix_for_token}"
            message += f". {fix[0].upper()}{fix[1:]}"
        else:
            message += f". Check spec.model.uri, and HF_ENDPOINT{self.variables_field}"
        return FetchError(reason, message)

    def no_answer_error(self, error: Exception) -> FetchError:
        """Builds the error for a connection that failed or ended early."""
        return self.unavailable_error(f"does not answer ({type(error).__name__}: {self.clean(error)})")

    def untrusted_certificate_error(self, error: Exception) -> FetchError:
        """Builds the error for an untrusted certificate of the hub or of a proxy."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{self.endpoint} has a certificate of an authority that this process does not trust "
            f"({self.clean(error)}). To trust the authority, {self.fix_for_certificates}",
        )

    def unavailable_error(self, problem: str) -> FetchError:
        """Builds the error for a hub that may answer later."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{self.endpoint} {problem}. Check the network, and HTTPS_PROXY or HF_ENDPOINT"
            f"{self.variables_field}",
            is_temporary=True,
        )

    def not_a_hub_error(self, problem: str) -> FetchError:
        """Builds the error for a server that does not behave like a hub."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{self.endpoint} does not answer like a model hub: {problem}. Check HF_ENDPOINT"
            f"{self.variables_field}",
        )

    def offline_error(self) -> FetchError:
        """Builds the error for offline mode."""
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"{names.ENV_HUB_OFFLINE} forbids requests to {self.endpoint} for {self.model}. Unset this "
            "variable",
        )

    def clean(self, words: object) -> str:
        """Returns a client's message on one line, without the token and without queries of URLs."""
        text = _QUERY.sub("", " ".join(str(words).split())) or "no details"
        return (text.replace(self.token, "***") if self.token else text)[:300]
