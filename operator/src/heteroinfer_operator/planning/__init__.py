"""Spec, model profile and nodes to a plan: who is which rank, where, with which layers and settings.

    request = GroupRequest(spec=spec, profile=profile, served_name="llama", model_path="/model")
    planned = plan_group(request, Capacity(rooms=build_rooms(nodes)))

PURE: imports the contract, the api and the pods' demands only; no os, time, random or logging.
"""

from heteroinfer_operator.planning.capacity import Capacity, GroupRequest, plan_group
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.placement import build_rooms
from heteroinfer_operator.planning.planner import Planned, make_plan

__all__ = ["Capacity", "GroupRequest", "Inventory", "Planned", "build_rooms", "make_plan", "plan_group"]
