"""The entry point by which vLLM finds `gpu_ipc.integrations.vllm` and `gpu_ipc.integrations.vllm_loader`."""


def register() -> None:
    """Register with vLLM in this process; later calls change nothing."""
    from gpu_ipc.integrations import vllm, vllm_loader

    vllm.register()
    vllm_loader.register()
