"""Writes the page of allowed variables and options from their lists: `python -m tests.allowed_page`."""

from collections.abc import Iterable, Iterator, Mapping

from heteroinfer_contract.refused_args import PLAN_OWNED, UNSUPPORTED, find_refused
from heteroinfer_operator.api.env_vars import OWNED_ENV, OWNED_ENV_PREFIX, SECRET_ENV
from heteroinfer_operator.reconcile.allowed_args import (
    ARGS_BY_TOPIC,
    KEYS,
    MAX_LOGPROBS,
    OFFLOADING,
    UNLISTED_OPTIONS,
    VALUES,
)
from heteroinfer_operator.reconcile.allowed_env import ENV_BY_TOPIC
from tests.cluster.folders import REPOSITORY

PAGE = REPOSITORY / "docs" / "user" / "reference" / "allowed-values.md"

_HEAD = """# Allowed variables and options

This page is generated from the operator's lists: `python -m tests.allowed_page` writes it. The chart's
`allowedEnvironment` and `allowedArguments` add names to the lists:
[Secure](../secure.md#what-a-resource-may-ask-for).
`heteroinfer plan -f FILE --chart-values VALUES` shows what an installation refuses before you apply the file.
"""


def render_page() -> str:
    """Returns the page."""
    return "\n".join([_HEAD, *_variables(), *_options()])


def _variables() -> Iterator[str]:
    yield "## Variables of engine.env\n"
    yield from _by_topic(ENV_BY_TOPIC)
    yield f"{_names(SECRET_ENV)} must come from `valueFrom.secretKeyRef`.\n"
    yield "### Variables that no installation allows\n"
    yield (
        "HeteroInfer reserves these variables, and all other variables that start with "
        f"`{OWNED_ENV_PREFIX}`: {_names(OWNED_ENV)}. The API server refuses them at apply.\n"
    )


def _options() -> Iterator[str]:
    """Yields the lines about the options of engine.args: allowed, limited, refused, and owned by plans."""
    yield "## Options of engine.args\n"
    yield "Write the full name, with hyphens or underscores. A flag such as `--enable-prefix-caching` may"
    yield "also be `--no-enable-prefix-caching`.\n"
    yield from _by_topic({topic: map(_allowed_form, each) for topic, each in ARGS_BY_TOPIC.items()})
    yield "### Options with a limited value\n"
    yield "| option | allowed keys or values |\n|---|---|"
    for option, allowed in sorted({**KEYS, **VALUES}.items()):
        yield f"| `{option}` | {_names(allowed)} |"
    yield f"| `--max-logprobs` | 0 to {MAX_LOGPROBS} |\n"
    yield "### Refused options, and what to do instead\n"
    yield "| option | reason | instead |\n|---|---|---|"
    for why in UNLISTED_OPTIONS:
        if why is not OFFLOADING:
            yield f"| {_names(why.options)} | {why.why} | {why.remedy} |"
    yield ""
    yield "### Options that no installation allows\n"
    yield "| option | instead |\n|---|---|"
    for option, remedy in sorted(PLAN_OWNED.items()):
        yield f"| `{option}` | {remedy} |"
    for feature in UNSUPPORTED:
        if feature.options:
            yield f"| {_names(feature.options)} | not supported ({feature.feature}): {feature.remedy} |"
    yield f"| {_names(OFFLOADING.options)} | {OFFLOADING.remedy} |"
    yield ""


def _allowed_form(option: str) -> str:
    """Returns the option, or its form with `no-` if only that form is allowed."""
    return f"--no-{option.removeprefix('--')}" if next(find_refused([option]), None) else option


def _by_topic(topics: Mapping[str, Iterable[str]]) -> Iterator[str]:
    yield "| topic | allowed |\n|---|---|"
    for topic, each in topics.items():
        yield f"| {topic} | {_names(each)} |"
    yield ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
