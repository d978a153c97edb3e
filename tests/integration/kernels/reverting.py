"""Puts functions that patches have replaced back. Imports vLLM."""

from vllm_heteroinfer.patches import replacing
from vllm_heteroinfer.patches.registry import PATCHES


def revert(patch_id: str) -> None:
    """Puts vLLM's own functions back in place of a patch's; a no-op where it is not applied."""
    for patch in PATCHES:
        if patch.id == patch_id:
            owner, name = replacing._find_target(patch)
            original = getattr(getattr(owner, name), replacing._ORIGINAL, None)
            if original is not None:
                setattr(owner, name, original)
