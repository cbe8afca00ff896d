"""What needs PyTorch: its pool over this library's two functions. Imported when it is asked for."""

from typing import Any

from gpu_ipc import _gpu_ipc

# PyTorch's pools borrow their allocators.
_allocators: list[Any] = []


def pool(device: int) -> Any:
    """Make a `torch.cuda.MemPool` that takes its segments from the session of a device."""
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(_gpu_ipc.__file__), "gpu_ipc_torch_alloc", "gpu_ipc_torch_free"
    )
    _allocators.append(allocator)
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocator.allocator())
