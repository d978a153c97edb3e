"""Messages about a hub that refuses a request, as a fetch pod and `heteroinfer plan` show them."""

from dataclasses import replace

import pytest

from heteroinfer_contract.failure import FailureReason
from vllm_heteroinfer.fetch.asked_hub import AskedHub

TOKEN = "hf_secret"
HUB = AskedHub(
    endpoint="https://hub", repository="o/m", revision="v9", token=TOKEN, fix_for_token="give a token"
)


@pytest.mark.parametrize(
    ("status", "code", "token", "reason", "words"),
    [
        (403, "GatedRepo", TOKEN, "MODEL_ACCESS_DENIED", "https://hub/o/m with the account of the token"),
        (403, "GatedRepo", "", "MODEL_ACCESS_DENIED", "of the token, and give a token"),
        (404, "RevisionNotFound", "", "MODEL_NOT_FOUND", "has no revision v9 at https://hub"),
        (404, "RepoNotFound", TOKEN, "MODEL_NOT_FOUND", "shows no model o/m. .* a token that can read it"),
        (401, "", "", "MODEL_NOT_FOUND", "shows no model o/m. .* If the model is private, give a token"),
        (401, "", TOKEN, "MODEL_ACCESS_DENIED", "answers 401 for hf://o/m: said. Check the token, or give"),
        (403, "", "", "MODEL_ACCESS_DENIED", "answers 403 for hf://o/m: said. Give a token"),
        (503, "", TOKEN, "MODEL_HUB_UNREACHABLE", "answers 503 for hf://o/m: said. Check the network"),
        (
            404,
            "EntryNotFound",
            TOKEN,
            "MODEL_NOT_FOUND",
            "answers 404 for hf://o/m: said. Check spec.model.uri, and HF_ENDPOINT",
        ),
    ],
)
def test_reports_an_error_status_of_the_hub_with_a_fix(
    status: int, code: str, token: str, reason: str, words: str
) -> None:
    error = replace(HUB, token=token).refusal_error(status, code, "said")
    assert error.reason is FailureReason[reason]
    assert error.is_temporary == (status == 503)
    with pytest.raises(type(error), match=words):
        raise error


def test_messages_contain_no_token_and_no_signature() -> None:
    said = HUB.clean(f"no 'https://cdn/file?sig=abc' for {TOKEN}\n at /path?sig=abc")
    assert said == "no 'https://cdn/file' for *** at /path"
    assert TOKEN not in repr(HUB)
