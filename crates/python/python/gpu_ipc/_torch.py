"""What needs PyTorch: its pools over this library's functions. Imported when it is asked for."""

from typing import Any

from gpu_ipc import _gpu_ipc

# By the names of both functions. PyTorch's pools borrow their allocators.
_allocators: dict[tuple[str, str], Any] = {}


def pool(device: int, *functions: str) -> Any:
    """Make a `torch.cuda.MemPool` that takes its segments from two functions of this library, and frees them so."""
    import torch

    alloc, free = functions
    allocator = _allocators.get((alloc, free))
    if allocator is None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(_gpu_ipc.__file__), alloc, free)
        _allocators[alloc, free] = allocator
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocator.allocator())
