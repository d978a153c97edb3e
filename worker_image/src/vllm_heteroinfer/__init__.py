"""Out-of-tree vLLM plugin: GPU and CPU ranks in one group. Imports neither torch nor vLLM here.

vLLM calls `platform_plugin` through the entry point `vllm.platform_plugins`. vLLM loads everything else
through the executor, worker and scheduler classes (docs/contributor/patches.md). Without a plan in the
environment, the plugin does not change vLLM.
"""

_PLATFORMS = {
    "cpu": "vllm_heteroinfer.platform.cpu.HeteroCpuPlatform",
    "cuda": "vllm_heteroinfer.platform.cuda.HeteroCudaPlatform",
}


def platform_plugin() -> str | None:
    """Returns the platform class of this process's role, or None outside of a group.

    The role decides, not the hardware: a CPU rank on a machine with GPUs stays a CPU rank.
    Source: vllm/platforms/__init__.py::resolve_current_platform_cls_qualname@v0.32.0.

    Raises:
        SystemExit: this process has a plan but no device of ours. vLLM logs any other error of a
            plugin at level DEBUG, and would go on with the platform of the hardware.
    """
    import os

    from heteroinfer_contract import names

    if names.ENV_PLAN not in os.environ:
        return None
    device = os.environ.get(names.ENV_HETEROGENEOUS_DEVICE, "")
    if device not in _PLATFORMS:
        raise SystemExit(
            f"{names.ENV_HETEROGENEOUS_DEVICE}: must be one of {', '.join(_PLATFORMS)} (got {device!r}). "
            "Start the pod with `heteroinfer-worker`: its supervisor sets the variable"
        )
    return _PLATFORMS[device]
