"""Planning: assigns ranks, nodes, layers and settings from a spec, a model's profile and nodes.

    request = GroupRequest(spec=spec, profile=profile, served_name="llama", model_path="/model")
    planned = plan_group(request, Capacity(free_nodes=build_free_nodes(nodes)))

Pure. Imports only the contract, api, nodes and vllm_support.
"""

from heteroinfer_operator.nodes.placement import build_free_nodes
from heteroinfer_operator.planning.auto_mode import make_plan
from heteroinfer_operator.planning.group_plan import Capacity, assign_existing_plan, plan_group
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.planner import EpochPlan, GroupRequest, Planned
