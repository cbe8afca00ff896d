"""What the examples need of an array library: PyTorch on a GPU, numpy on the host backend."""

from typing import Any

import gpu_ipc

Array = Any


def full(session: gpu_ipc.Session, count: int, value: float) -> Array:
    """Make an array of `count` float32, all of them `value`."""
    if session.device.kind == "host":
        import numpy

        # Ordinary host memory has no handle for other processes, so the array is born in the session's.
        array = numpy.from_dlpack(session.alloc(4 * count)).view(numpy.float32)
        array[:] = value
        return array
    import torch

    return torch.full((count,), value, dtype=torch.float32, device=f"cuda:{session.device.ordinal}")


def view(block: gpu_ipc.Block, device: gpu_ipc.Device) -> Array:
    """Make an array of float32 of a block's bytes; it keeps the block."""
    if device.kind == "host":
        import numpy

        return numpy.from_dlpack(block).view(numpy.float32)
    import torch

    return torch.from_dlpack(block).view(torch.float32)


def taken(received: gpu_ipc.Received) -> Array:
    """Make an array of what was claimed; it alone keeps the lease."""
    if received.device.kind == "host":
        import numpy

        return numpy.from_dlpack(received)
    return received.torch()


def holds(array: Array, value: float) -> bool:
    """Say whether every element is `value`."""
    return bool((array == value).all())
