"""A mode that contains another mode calls its hooks. Reads the sources, because the modules import vLLM."""

import ast

from tests.running_up import REPOSITORY
from vllm_heteroinfer.rank.worker.rank_mode import RankMode

WORKER = REPOSITORY / "worker_image/src/vllm_heteroinfer/rank/worker"
HOOKS = {name for name in vars(RankMode) if not name.startswith("_")} - {"follows"}


def hooks(module: str, class_name: str) -> dict[str, str]:
    """Returns the sources of the hooks that a class defines itself, by name."""
    tree = ast.parse((WORKER / module).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in HOOKS]
    return {method.name: ast.unparse(method) for method in methods}


def test_a_tensor_group_forwards_every_hook_of_its_stages() -> None:
    own, of_stages = hooks("tensor_group.py", "TensorGroup"), hooks("modes.py", "PipelineHops")
    passed = {name for name, text in own.items() if f"self._stages.{name}(" in text}
    assert passed == set(of_stages) != set()
