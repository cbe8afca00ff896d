"""The entry point by which vLLM finds `gpu_ipc.integrations.vllm`."""


def register() -> None:
    """Register with vLLM in this process; later calls change nothing."""
    from gpu_ipc.integrations import vllm

    vllm.register()
