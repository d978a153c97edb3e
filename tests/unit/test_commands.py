"""What a text says to type is there: targets of make, options, modules, tests, selections, markers.

Each kind has a function that finds what a text names, and a test that it finds what is wrong.
"""

import argparse
import contextlib
import io
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from heteroinfer_operator.cli import COMMANDS, build_parser
from tests.unit.pages import ROOT, TODAY, code, name_of, without_what_was
from vllm_heteroinfer.calibration import __main__ as calibration
from vllm_heteroinfer.calibration import network
from vllm_heteroinfer.launch import cli

FOLDERS = ("charts", "crds", "examples", "operator", "tests", "worker_image")
AFTER_THE_VERB = (
    "a|all|an|another|each|embedding|environments|float32|good|in|is|it|its|none|no|of|one|only|others?|ranks|side"
    "|the|them|up|us|views|zeros"
)
"""Words that sentences of ours have after the verb make."""
OPTIONS_OF_OTHERS = {
    "docker build": {"--target"},
    "helm install and upgrade": {
        "--create-namespace",
        "--reset-then-reuse-values",
        "--reuse-values",
        "--take-ownership",
        "--timeout",
    },
    "kubectl api-resources": {"--api-group"},
    "kubectl apply": {"--field-manager", "--force-conflicts", "--prune", "--server-side"},
    "kubectl create rolebinding": {"--clusterrole", "--group"},
    "kubectl create secret generic": {"--from-literal"},
    "kubectl create secret tls": {"--cert", "--key"},
    "kubectl delete": {"--all", "--cascade"},
    "kubectl explain": {"--recursive"},
    "kubectl get": {"--no-headers", "--raw"},
    "kubectl label": {"--overwrite"},
    "kubectl patch": {"--type"},
    "kubectl scale": {"--replicas"},
    "kubectl wait": {"--for", "--timeout"},
    "pkg/epp/server/options.go of gateway-api-inference-extension@v1.5.0": {
        "--metrics-endpoint-auth",
        "--pool-name",
        "--pool-namespace",
        "--tracing",
    },
    "llama-server of llama.cpp": {"--n-cpu-moe"},
    "pytest": {"--durations"},
    "vllm/engine/arg_utils.py::EngineArgs.add_cli_args@v0.32.0": {"--ir-op-priority", "--profiler-config"},
}
"""Options that pages name, by what has them; vLLM's others are in our lists of allowed and refused ones."""
LISTS_OF_VLLM = (
    "operator/src/heteroinfer_operator/reconcile/allowed_args.py",
    "worker_image/src/heteroinfer_contract/refused_args.py",
)
OF_OTHERS = ("asyncio/", "vllm/")
"""Projects of whose files names are cited, some without a version."""
OF_PYTEST = {"asyncio", "filterwarnings", "parametrize", "skip", "skipif", "timeout", "usefixtures", "xfail"}
_MAKE = re.compile(
    r"(?:\bmake |(?<!import )(?<!, )(?<!-recommends )\bmake\n[\s#>]*)(?:[A-Z_]+=\S+ )*"
    rf"(?!(?:{AFTER_THE_VERB})\b)([a-z][a-z0-9-]*+)(?![\w(]|\.\w)"
)
_MAKE_IN_CODE = re.compile(r"(?:^|[;&|(] ?|\bsudo |\b[A-Z_]+=\S+ )make ([^;&|)]*)")
_OPTION = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)")
_WORKER = re.compile(r"\bheteroinfer-worker ([a-z]+)\b([^|;&`\n]*)")
_LONG_OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*\w)(?!-\*|\w)")
_DECLARED = re.compile(r"\(\s*(?:\"-\w\",\s*)?\"(--[a-z][\w-]*)\"")
_SELECTED = re.compile(r"\bpytest((?:[^\n|;&`]|\\\n)*?) -k[ =](\"[^\"]*\"|'[^']*'|[^\s`;|&)]+)")
_TEST = re.compile(r"(?:([\w./-]+\.py)::(?:\w+::)?)?\b(test_\w+)(?![\w/])(\.py)?(?:\[([^]`]*)\])?")
_REFERENCE = re.compile(r"(?<![\w./-])((?:[\w-]+/)+\w+\.py|test_\w+\.py)::(\w+)(?![\w.]*@)")
_MARKER = re.compile(
    r"\bpytest\.mark\.(\w+)|\bmarked\s+`(\w+)`"
    r"|(?:\bpytest|\$\(PYTEST\)|\$\(TESTS\))(?:[^\n|;&`]|\\\n)* -m[ =](\"[^\"]*\"|'[^']*'|\w+)"
    r"|`-m (\"[^\"]*\"|'[^']*'|\w+)`"
)


@cache
def texts() -> dict[str, str]:
    """Returns what people write here, by file: pages of today, and sources with their comments."""
    files = [
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in {".py", ".yaml", ".tpl", ".txt", ".toml", ".h", ".cpp"} and file.is_file()
        if "versions" not in file.parts and file != Path(__file__)
    ]
    files += [
        *TODAY,
        *(ROOT / ".ci").iterdir(),
        *(ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml")),
    ]
    return {name_of(file): file.read_text() for file in files}


def wrong(find: Callable[[str], Iterable[str]], files: Iterable[str] | None = None) -> list[str]:
    """Returns what is wrong in files, or in all."""
    return [f"{name}: {odd}" for name in files or texts() for odd in find(texts()[name])]


def pages() -> list[str]:
    return [name_of(page) for page in TODAY]


@cache
def targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text()
    return frozenset(
        word for line in re.findall(r"^([a-z][\w -]*):(?!=)", makefile, re.M) for word in line.split()
    )


def targets_named(text: str) -> Iterator[str]:
    """Yields what follows `make`: each word of it in code, elsewhere one that is none of a sentence."""
    if "make" not in text:
        return
    for line in code(text):
        for words in _MAKE_IN_CODE.findall(line):
            without_values = re.sub(r"[A-Z_]+=(?:\"[^\"]*\"|'[^']*'|\S+)", "", words)
            yield from (word.strip("\\") for word in without_values.split())
    yield from _MAKE.findall(text)


def wrong_targets(text: str) -> list[str]:
    return [target for target in targets_named(text) if target not in targets()]


def test_every_make_target_in_the_docs_exists() -> None:
    assert {"test", "cluster-down"} <= targets()
    assert not [target for target in targets() if re.fullmatch(AFTER_THE_VERB, target)]
    assert sum(len(list(targets_named(text))) for text in texts().values()) > 100
    assert wrong(wrong_targets) == []


@pytest.mark.parametrize(
    "text",
    [
        "`make tset`",
        "`make check tset`",
        "```\nsudo make tset OUT=DIR\n```",
        "run make tset before each commit",
        "as `LANES=1 make tset` does",
        "OUT=DIR make tset, as root",
        "run make\n  tset",
        "# what make\n# tset does",
        "| make tset | an hour |",
        '"""Run by make tset."""',
        'f"missing: {name}; make tset builds it"',
        "tset: setup  ## what `make tset-all` has\n",
        'echo "run it as root, or: make tset" >&2',
    ],
)
def test_a_missing_make_target_is_found(text: str) -> None:
    assert set(wrong_targets(text)) in ({"tset"}, {"tset-all"})


@pytest.mark.parametrize(
    "text", ["make a rank wait", "others make\nit", "from tests import make\nfrom x import y", "make check"]
)
def test_the_verb_make_is_not_read_as_a_command(text: str) -> None:
    assert wrong_targets(text) == []


def command_options() -> dict[str, set[str]]:
    """Returns the options of each command."""
    (commands,) = (
        action
        for action in build_parser([], all_commands=True)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: {option for action in parser._actions for option in action.option_strings}
        for name, parser in commands.choices.items()
    }


def test_every_option_of_the_command_line_in_the_docs_exists() -> None:
    named = [
        (page, command, set(_OPTION.findall(rest)))
        for page in pages()
        for line in code(texts()[page])
        for command, rest in re.findall(r"(?:^|[ /(])heteroinfer ([a-z]+)(?![\w/])([^|;&]*)", line)
    ]
    assert {command for _, command, _ in named} <= set(COMMANDS)
    known = command_options()
    assert sum(len(options) for _, _, options in named) > 15
    assert not [(page, command, odd) for page, command, options in named if (odd := options - known[command])]


@cache
def worker_options(command: str) -> frozenset[str]:
    """Returns what `heteroinfer-worker COMMAND --help` lists; nothing for a command that there is not."""
    output = io.StringIO()
    silent = contextlib.redirect_stderr(io.StringIO())
    with contextlib.redirect_stdout(output), silent, contextlib.suppress(SystemExit):
        main = {"calibrate": calibration.main, "network": network.main}.get(command)
        cli.main([command, "--help"]) if main is None else main(["--help"])
    rows = (line.strip().partition("  ")[0] for line in output.getvalue().splitlines())
    return frozenset(option for row in rows if row.startswith("-") for option in _OPTION.findall(row))


def wrong_worker_options(text: str) -> Iterator[str]:
    for command, rest in _WORKER.findall(text):
        known = worker_options(command)
        if not known:
            yield command
        yield from (f"{command} {option}" for option in _OPTION.findall(rest) if option not in known)


def test_every_option_of_the_worker_in_the_docs_exists() -> None:
    assert "--repository" in worker_options("fetch")
    assert worker_options("calibrate") >= {"-o", "--limit", "--termination-message-path", "--help"}
    assert worker_options("network") >= {"-o", "--listen", "--connect", "--wait", "--limit", "--linger"}
    assert worker_options("run")
    assert sum(len(_WORKER.findall(text)) for text in texts().values()) > 15
    assert wrong(wrong_worker_options) == []


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("`heteroinfer-worker calibrat`", ["calibrat"]),
        ("heteroinfer-worker calibrate -o FILE --limits 5", ["calibrate --limits"]),
        ("`heteroinfer-worker fetch --repo ORG/MODEL`", ["fetch --repo"]),
        ("```\nheteroinfer-worker inspect --model DIR -v\n```", ["inspect -v"]),
        ("heteroinfer-worker run --limit 5", ["run --limit"]),
        ("`heteroinfer-worker` starts; heteroinfer-worker fetch --cache DIR | jq -r .x", []),
    ],
)
def test_a_missing_option_of_the_worker_is_found(text: str, odd: list[str]) -> None:
    assert list(wrong_worker_options(text)) == odd


def source_of(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return "".join(file.read_text() for file in files)


def test_every_option_of_a_test_module_in_the_docs_exists() -> None:
    named = [
        (page, module, option)
        for page in pages()
        for line in code(texts()[page])
        for module, rest in re.findall(r"python3? -m (tests(?:\.\w+)+)([^|;&]*)", line)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)
    ]
    assert len(named) > 20
    assert not [each for each in named if f'"{each[2]}"' not in source_of(each[1])]


@cache
def known_options() -> frozenset[str]:
    """Returns the long options of our commands, of vLLM and of others."""
    programs = (text for name, text in texts().items() if name.endswith(".py") and "/unit/" not in name)
    ours = {option for text in programs for option in _DECLARED.findall(text)}
    of_vllm = {option for name in LISTS_OF_VLLM for option in _LONG_OPTION.findall(texts()[name])}
    return frozenset({"--help"}.union(ours, of_vllm, *OPTIONS_OF_OTHERS.values()))


def wrong_options(text: str) -> list[str]:
    """Returns each option that nothing has, wherever it stands: alone, in a table, in a comment."""
    return [
        option
        for option in _LONG_OPTION.findall(text)
        if option not in known_options() and f"--{option.removeprefix('--no-')}" not in known_options()
    ]


def test_every_option_in_the_docs_exists() -> None:
    assert {"--model-dir", "--groups-at-once", "--cpu-offload-gb", "--scheduler-cls"} <= known_options()
    files = [
        *pages(),
        *(name for name in texts() if name.startswith("examples/") or "heteroinfer/templates/NOTES" in name),
        "charts/heteroinfer/values.yaml",
    ]
    said = {option for name in files for option in _LONG_OPTION.findall(texts()[name])}
    assert len(said) > 80
    assert not set().union(*OPTIONS_OF_OTHERS.values()) - said, "options that no page names need no entry"
    assert wrong(wrong_options, files) == []


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("give `--model-directory` a path", ["--model-directory"]),
        ("| `--calibrations` | FILE |", ["--calibrations"]),
        ("```\nheteroinfer plan -f FILE    # with --gpu-count, too\n```", ["--gpu-count"]),
        ("not by --cpu-offload-gib=4", ["--cpu-offload-gib"]),
        ("--no-such-thing", ["--no-such-thing"]),
        ("`--ssl-*`, `--model-dir`, --no-enable-prefix-caching, --for=condition=Available, a -- b", []),
    ],
)
def test_an_unknown_option_is_found(text: str, odd: list[str]) -> None:
    assert wrong_options(text) == odd


@cache
def known_tests() -> dict[str, frozenset[str]]:
    """Returns the functions of each file of tests, by its path."""
    return {
        name: frozenset(re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M))
        for name, text in texts().items()
        if Path(name).name.startswith("test_")
    } | {name_of(Path(__file__)): frozenset()}


@cache
def all_tests() -> str:
    return "".join(
        text for name, text in texts().items() if name.startswith("tests/") and name.endswith(".py")
    )


def wrong_tests(page: str) -> Iterator[str]:
    """Yields each test that a page names and that is not there, but for what its tables call before."""
    for match in _TEST.finditer(without_what_was(page)):
        file, name, suffix, parameters = match.groups()
        if suffix:
            there = any(path.endswith(f"/{name}.py") for path in known_tests())
        else:
            end = f"/{file}" if file else ""
            there = any(name in tests for path, tests in known_tests().items() if f"/{path}".endswith(end))
        parts = re.split(r"[-…]+", parameters or "")
        if not there or not all(part.isdecimal() or part in all_tests() for part in parts):
            yield match[0]


def test_every_test_that_a_page_names_exists() -> None:
    assert sum(len(_TEST.findall(texts()[page])) for page in pages()) > 200
    assert wrong(wrong_tests, pages()) == []


@pytest.mark.parametrize(
    "text",
    [
        "`test_nothing_of_this_name`",
        "test_nothing_of_this_name keeps it",
        "| 61 | `worker/test_tensor.py::test_compiled_rank` |",
        "`worker/test_two_stages.py::test_compiled_ranks_serve`, which is in another file",
        "`tests/unit/test_word.py`",
        "`test_nothing_of_this_name[gloo]`",
        "`test_two_pods_split_every_layer[by-pigeon]`",
        "| before | after |\n|---|---|\n| `test_was` | `test_is_not` |",
    ],
)
def test_a_missing_test_is_found(text: str) -> None:
    assert len(list(wrong_tests(text))) == 1


def test_a_table_may_name_removed_tests_in_its_before_column() -> None:
    page = "| shown before by | shown now by |\n|---|---|\n| `test_was` | `test_compiled_ranks_serve` |"
    assert list(wrong_tests(page)) == []
    assert list(wrong_tests(f"{page}\n\n| a |\n|---|\n| `test_was` |")) == ["test_was"]


def selectable(arguments: str) -> str:
    """Returns what `-k` looks in: names of tests and files, and what parameters may be called."""
    below = tuple(word for word in arguments.split() if word.startswith("tests/")) or ("tests/",)
    files = {name: text for name, text in texts().items() if name.startswith(below) and name.endswith(".py")}
    found = [
        word
        for text in files.values()
        for word in re.findall(r"\bdef (test_\w+)|[\"']([^\s\"']+)[\"']", text)
    ]
    return "\n".join([*files, *(name or value for name, value in found)]).lower()


def wrong_selections(text: str) -> list[str]:
    return [
        word
        for arguments, expression in _SELECTED.findall(text)
        for word in re.findall(r"[^\s()\"']+", expression)
        if word not in {"and", "or", "not"} and word.lower() not in selectable(arguments)
    ]


def test_every_selection_of_tests_finds_a_test() -> None:
    assert sum(len(_SELECTED.findall(texts()[page])) for page in pages()) > 2
    assert wrong(wrong_selections, pages()) == []


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("pytest tests/integration/worker/test_two_stages.py -k prefixes  # a group", ["prefixes"]),
        ("(`pytest tests/gpu/test_feed_forward.py -k bf17`, tiny models)", ["bf17"]),
        ("python -m pytest tests/gpu -k 'not bf17 and graphs'", ["bf17"]),
        ("pytest tests/integration/worker/test_two_stages.py -k bf17", ["bf17"]),
        ("pytest tests/gpu/test_feed_forward.py -k bf16; make -k every_fold", []),
    ],
)
def test_a_selection_that_finds_no_test_is_found(text: str, odd: list[str]) -> None:
    assert wrong_selections(text) == odd


def wrong_references(text: str) -> list[str]:
    """Returns each `file.py::name` of ours whose file has no such function, class or constant."""
    wrong = []
    for path, name in _REFERENCE.findall(without_what_was(text)):
        defined = re.compile(rf"^(?: *(?:async )?(?:def|class) )?{name}\b", re.M)
        found = any(defined.search(own) for file, own in texts().items() if f"/{file}".endswith(f"/{path}"))
        if not found and not path.startswith(OF_OTHERS):
            wrong.append(f"{path}::{name}")
    return wrong


def test_every_name_that_a_text_refers_to_exists_in_its_file() -> None:
    assert sum(len(_REFERENCE.findall(text)) for text in texts().values()) > 40
    assert wrong(wrong_references) == []


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("as in `tests/models.py::Receipt`", ["tests/models.py::Receipt"]),
        ("# see test_pure.py::test_purity", ["test_pure.py::test_purity"]),
        ("| `tests/models.py::Recipe` | `tests/model.py::Recipe` |", ["tests/model.py::Recipe"]),
        ("`kube/server.py::_request`, a comment's word", ["kube/server.py::_request"]),
        ("`vllm/config.py::ModelConfig`, `aiohttp/client.py::ClientSession._request@3.14`", []),
    ],
)
def test_finds_references_to_missing_names(text: str, odd: list[str]) -> None:
    assert wrong_references(text) == odd


@cache
def markers() -> frozenset[str]:
    """Returns the markers that pyproject.toml registers, and the suites that have some of their own."""
    options = tomllib.loads(texts()["pyproject.toml"])["tool"]["pytest"]["ini_options"]
    own = (
        re.findall(r'addinivalue_line\(\s*"markers", "(\w+):', text)
        for name, text in texts().items()
        if name.endswith("conftest.py")
    )
    registered = (line.partition(":")[0] for line in options["markers"])
    return frozenset({*registered, *OF_PYTEST, *(name for names in own for name in names)})


def markers_named(text: str) -> Iterator[str]:
    for groups in _MARKER.findall(text):
        yield from (word for word in re.findall(r"\w+", "".join(groups)) if word not in {"and", "or", "not"})


def wrong_markers(text: str) -> list[str]:
    return [name for name in markers_named(text) if name not in markers()]


def test_every_marker_is_registered() -> None:
    assert {"unhurried", "gpus2"} <= markers()
    files = [*pages(), "Makefile", "pyproject.toml", *(name for name in texts() if name.startswith(".ci/"))]
    assert {"gang_schedulers", "unhurried", "gpus2"} <= {n for f in files for n in markers_named(texts()[f])}
    assert wrong(wrong_markers, files) == []


@pytest.mark.parametrize(
    "text",
    [
        "`pytest tests/e2e -m every_fold`",
        "python -m pytest tests -m every_fold",
        '\t$(TESTS) tests/e2e -m "not unhurried and not every_fold"',
        "\t$(PYTEST) tests/e2e \\\n\t  -m every_fold",
        "`@pytest.mark.every_fold` is for it",
        "what is long is marked `every_fold`",
        "leave it out by `-m 'not every_fold'`",
    ],
)
def test_a_marker_that_is_not_registered_is_found(text: str) -> None:
    assert wrong_markers(text) == ["every_fold"]
