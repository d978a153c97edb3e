"""The parts of a model that plans need: attention, experts, formats, encoder. Stdlib only; pure.

The inputs are a parsed config.json and the names, types and sizes of tensors, which `model_files` reads.
"""

from heteroinfer_contract.model.layer_kind import AttentionKind, LayerKind
from heteroinfer_contract.model.scheme import Routing, Scheme, SchemeName

__all__ = ["AttentionKind", "LayerKind", "Routing", "Scheme", "SchemeName"]
