"""Restores vLLM's own functions that patches have replaced. Imports vLLM."""

from vllm_heteroinfer.patches import replacing
from vllm_heteroinfer.patches.registry import PATCHES


def revert(patch_id: str) -> None:
    """Restores the functions that a patch has replaced. Does nothing if the patch is not applied."""
    for patch in PATCHES:
        if patch.id == patch_id:
            owner, name = replacing._find_target(patch)
            original = getattr(getattr(owner, name), replacing._ORIGINAL, None)
            if original is not None:
                setattr(owner, name, original)
