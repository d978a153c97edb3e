"""Makes mypy check `model.changed(field=value)` like the constructor of the model.

Pydantic's `model_copy(update=...)` accepts any dictionary, so mypy would not see a wrong field or type.
"""

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, Var
from mypy.plugin import MethodSigContext, Plugin
from mypy.types import FunctionLike, Instance, Type, get_proper_type

_BASE = "heteroinfer_operator.api.base.Model"
_FIELDS = "pydantic-mypy-metadata"


class TypedChanges(Plugin):
    """Gives `Model.changed` the model's fields as optional keywords."""

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        return _signature if fullname.endswith(".changed") else None


def _signature(context: MethodSigContext) -> FunctionLike:
    """Returns the signature of `changed` for a model: each field is an optional keyword."""
    model, default = get_proper_type(context.type), context.default_signature
    if not isinstance(model, Instance) or not model.type.has_base(_BASE):
        return default
    fields: dict[str, Type] = {}
    for base in model.type.mro:
        for name in base.metadata.get(_FIELDS, {}).get("fields", {}):
            found = base.names.get(name)
            if found is not None and isinstance(found.node, Var) and found.node.type is not None:
                fields.setdefault(name, found.node.type)
    return default.copy_modified(
        arg_types=list(fields.values()), arg_kinds=[ARG_NAMED_OPT] * len(fields), arg_names=list(fields)
    )


def plugin(version: str) -> type[TypedChanges]:
    """Returns the plugin class. mypy calls this function."""
    return TypedChanges
