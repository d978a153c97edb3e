"""Level-triggered decisions: from (observation, now, options) to actions and the next status.

One function handles create, update, resume and timer. Pure.
"""

from heteroinfer_operator.reconcile.allowed import Allowed
from heteroinfer_operator.reconcile.options import Options
from heteroinfer_operator.reconcile.reconcile import reconcile

__all__ = ["Allowed", "Options", "reconcile"]
