"""Members of our classes, as comments and docstrings of the product name them: `Class.member`.

No other tool reads these names, so a member that is renamed would leave a comment that misleads.
"""

import ast
import re
from collections import defaultdict

from tests.unit.product import SOURCES, modules_below

_MEMBER = re.compile(r"`(?:\w+\.)*([A-Z]\w+)\.([A-Za-z_]\w*)[^`]*`")


class Classes:
    """The classes of the product by name; classes of the same name count as one."""

    def __init__(self, sources: list[str]) -> None:
        self._members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    self._members[node.name] |= _members_of(node)
                    self._bases[node.name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def lack(self, name: str, member: str) -> bool:
        """Returns whether a class of ours, and each of its bases, has no such member."""
        if name not in self._members or member in self._members[name]:
            return False
        return all(self._members.get(base) and self.lack(base, member) for base in self._bases[name])


def _members_of(cls: ast.ClassDef) -> set[str]:
    names = set()
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                names.add(name)
    return names


def find_unknown(sources: list[str]) -> list[str]:
    """Returns the members that comments name and that do not exist."""
    classes = Classes(sources)
    named = {match.groups() for source in sources for match in _MEMBER.finditer(source)}
    return sorted(f"{name}.{member}" for name, member in named if classes.lack(name, member))


def test_comments_name_members_that_exist() -> None:
    sources = [file.read_text() for file in modules_below(SOURCES).values()]
    assert len([each for source in sources for each in _MEMBER.findall(source)]) > 10
    assert find_unknown(sources) == []


def test_reports_a_member_that_is_gone_and_accepts_inherited_members() -> None:
    base = "class Base:\n    kept: int = 0\n    def __init__(self): self.own = 1\n"
    used = (
        "class Derived(Base):\n    '''See `Base.gone`, `Derived.kept`, `Derived.own()` and `Other.what`.'''\n"
    )
    foreign = "class Foreign(Elsewhere):\n    '''See `Foreign.inherited`.'''\n"
    assert find_unknown([base, used, foreign]) == ["Base.gone"]
