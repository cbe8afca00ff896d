"""Plugs for other projects, each imported only when it is asked for: `gpu_ipc.integrations.ray`, `gpu_ipc.integrations.vllm`."""
