"""What a model is made of, as far as plans need it: attention, experts, formats, encoder. Stdlib only; pure.

Read from a parsed config.json and the names, types and sizes of tensors; `model_files` reads those.
"""

from heteroinfer_contract.model.layer_kind import AttentionKind, LayerKind
from heteroinfer_contract.model.scheme import Routing, Scheme, SchemeName

__all__ = ["AttentionKind", "LayerKind", "Routing", "Scheme", "SchemeName"]
