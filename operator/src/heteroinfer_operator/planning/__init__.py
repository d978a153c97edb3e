"""Spec, model profile and inventory to a plan: who is which rank, where, with which layers and settings.

    inventory = Inventory(gpus={"nvidia.com/gpu": 1})
    planned = make_plan(spec, profile, inventory, served_name="llama", model_path="/model")

PURE: imports the contract and the api only; no os, time, random or logging.
"""

from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.planner import Planned, make_plan

__all__ = ["Inventory", "Planned", "make_plan"]
