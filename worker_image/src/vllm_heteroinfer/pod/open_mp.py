"""Reads the number of threads from OMP_NUM_THREADS. Pure.

A user may set a number for each level of nested parallel regions: `4,2` (OpenMP 5.2, section 21.1.2).
"""

import re
from collections.abc import Mapping
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError

_NUMBERS: Final = re.compile(r"\s*0*([1-9][0-9]{0,5})\s*(,\s*0*[1-9][0-9]{0,5}\s*)*")


def omp_thread_count(env: Mapping[str, str]) -> int | None:
    """Returns the number of threads of outermost parallel regions; None if the variable is not set.

    Raises:
        ContractError: the value is not a number of threads; the message names the variable.
    """
    text = env.get(names.ENV_OMP_THREADS, "")
    if not text.strip():
        return None
    numbers = _NUMBERS.fullmatch(text)
    if numbers is None:
        raise ContractError(
            f"{names.ENV_OMP_THREADS}: must be a number above 0, or several numbers separated by commas (got "
            f"{text[:80]!r}). Correct it in spec.engine.env"
        )
    return int(numbers[1])
