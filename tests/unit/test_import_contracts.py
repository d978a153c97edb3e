"""Each contract of import-linter holds, and fails for one wrong import or for a module without a layer."""

import copy
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.application import use_cases
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract

ACROSS = "operator -> contract <- worker, never across"
CONTRACT = "the contract imports neither side, and the standard library only"
OPERATOR = "layers of the operator"
PURE = "what says that it is pure has no client, clock, file or chance"
WORKER = "layers of the worker: a package for each process, and what several of them share below"
CIRCLES = "no circle between the packages of the worker, at any depth"
SUPERVISOR = "the supervisor needs neither torch nor vLLM"

TYPES = {
    kind.type_name: kind
    for kind in (AcyclicSiblingsContract, ForbiddenContract, IndependenceContract, LayersContract)
}
configure()
OPTIONS = use_cases.read_user_options(str(Path(__file__).parents[2] / "pyproject.toml"))
CONTRACTS = {options["name"]: options for options in OPTIONS.contracts_options}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(
        *OPTIONS.session_options["root_packages"], include_external_packages=True, cache_dir=None
    )


def holds(name: str, imports: grimp.ImportGraph) -> bool:
    """Returns whether a contract of pyproject.toml holds for these imports."""
    options: dict[str, Any] = CONTRACTS[name]
    contract = TYPES[options["type"]](
        name=name, session_options=OPTIONS.session_options, contract_options=options
    )
    return contract.check(copy.deepcopy(imports), verbose=False).kept


@pytest.mark.parametrize("name", CONTRACTS)
def test_contract_holds(imports: grimp.ImportGraph, name: str) -> None:
    assert holds(name, imports)


WRONG = (
    (ACROSS, "heteroinfer_operator.local.process", "vllm_heteroinfer.pod.addresses"),
    (ACROSS, "vllm_heteroinfer.launch.supervisor", "heteroinfer_operator.quantity"),
    (CONTRACT, "heteroinfer_contract.plan", "pydantic"),
    (CONTRACT, "heteroinfer_contract.plan", "heteroinfer_operator.api"),
    (CONTRACT, "heteroinfer_contract.names", "vllm_heteroinfer.pod.channel"),
    (OPERATOR, "heteroinfer_operator.reconcile.group", "heteroinfer_operator.kube.server"),
    (OPERATOR, "heteroinfer_operator.planning.planner", "heteroinfer_operator.manifests.service"),
    (OPERATOR, "heteroinfer_operator.kube.adapter", "heteroinfer_operator.local.adapter"),
    (OPERATOR, "heteroinfer_operator.api.spec", "heteroinfer_operator.reconcile.options"),
    (PURE, "heteroinfer_operator.reconcile.group", "time"),
    (PURE, "heteroinfer_operator.manifests.service", "kubernetes"),
    (PURE, "vllm_heteroinfer.launch.culprit", "os"),
    (WORKER, "vllm_heteroinfer.pod.channel", "vllm_heteroinfer.group.queues"),
    (WORKER, "vllm_heteroinfer.group.rendezvous", "vllm_heteroinfer.rank.context"),
    (WORKER, "vllm_heteroinfer.distributed.transport", "vllm_heteroinfer.engine.executor"),
    (CIRCLES, "vllm_heteroinfer.group.rendezvous", "vllm_heteroinfer.rank.context"),
    (CIRCLES, "heteroinfer_contract.plan", "heteroinfer_contract.group_report"),
    (SUPERVISOR, "vllm_heteroinfer.launch.supervisor", "torch"),
    (SUPERVISOR, "vllm_heteroinfer.pod.channel", "vllm"),
    (SUPERVISOR, "vllm_heteroinfer.launch.cli", "vllm_heteroinfer.group.rendezvous"),
)


@pytest.mark.parametrize(("name", "importer", "imported"), WRONG)
def test_contract_fails_for_one_wrong_import(
    imports: grimp.ImportGraph, name: str, importer: str, imported: str
) -> None:
    wrong = copy.deepcopy(imports)
    assert importer in wrong.modules
    if imported not in wrong.modules:
        assert imported in CONTRACTS[name]["forbidden_modules"], "nothing imports it: must be named"
        wrong.add_module(imported, is_squashed=True)
    wrong.add_import(importer=importer, imported=imported)
    assert not holds(name, wrong)


@pytest.mark.parametrize(
    ("name", "package"), [(OPERATOR, "heteroinfer_operator"), (WORKER, "vllm_heteroinfer")]
)
def test_a_module_without_a_layer_is_refused(imports: grimp.ImportGraph, name: str, package: str) -> None:
    wrong = copy.deepcopy(imports)
    wrong.add_module(f"{package}.new")
    assert not holds(name, wrong)


def test_every_contract_is_tried() -> None:
    assert {name for name, _, _ in WRONG} == CONTRACTS.keys()
