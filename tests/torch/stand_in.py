"""Runs one of testing/torch/*.py without a GPU: shared memory takes the place of CUDA's, in the host backend's form.

    python3 stand_in.py testing/torch/consumer.py ARGUMENTS

What is PyTorch's own all the same: tensors, views, storages, and the decrease of a counter, which is the function that it
calls on a GPU too (`UntypedStorage._release_ipc_counter_cuda`).
"""

import ctypes
import fcntl
import mmap
import os
import random
import runpy
import struct
import sys
import time
import warnings
import weakref

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402

MAGIC = b"gpuipcH1"
SLOTS, HEADER = 10_000, 64
F_ADD_SEALS, SEALS = 1033, 2 | 4  # SHRINK and GROW
EVENT_WORDS = 64


class Segment(mmap.mmap):
    """A mapping. One of memory that is shared here keeps its file open."""

    fd = address = None

    def __del__(self):
        if self.fd is not None:
            shared.pop(self.address, None)
            os.close(self.fd)


def handle_of(fd, length):
    return MAGIC + struct.pack("<IIQQ", os.getpid(), fd, os.fstat(fd).st_ino, length) + bytes(32)


def opened(handle):
    """Maps what a handle of the host backend describes."""
    pid, fd, _, length = struct.unpack_from("<IIQQ", handle, 8)
    file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return Segment(file, length)
    finally:
        os.close(file)


def wait(handle):
    """Waits until the last recording of an event of the host backend is done."""
    page = opened(handle)
    words = (ctypes.c_uint64 * EVENT_WORDS).from_buffer(page)
    last, deadline = words[0], time.monotonic() + 60
    while words[1 + last % (EVENT_WORDS - 1)] < last:
        assert time.monotonic() < deadline, "an event never completes"
        time.sleep(0.0001)


segments = weakref.WeakValueDictionary()


def new_shared_cuda(device, handle, size, offset, name, slot, event, sync):
    """Opens a storage; when PyTorch drops it, PyTorch's own function decreases its counter."""
    handle = handle[2:] if len(handle) == 66 else handle
    if sync:
        wait(event)
    segment = segments.get(handle)
    if segment is None:
        segment = segments[handle] = opened(handle)

    class Storage(ctypes.c_char * size):
        def __del__(self):
            torch.UntypedStorage._release_ipc_counter_cuda(name, slot)

    content = Storage.from_buffer(segment, offset)
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


class Counters:
    """Counter files and limbo, as PyTorch has them: what was sent is kept while it is counted."""

    def __init__(self):
        self.files, self.current, self.limbo = [], None, []

    def next(self, storage):
        self.limbo = [sent for sent in self.limbo if struct.unpack_from("<q", sent[0], HEADER + 8 * sent[1])[0]]
        if self.current is None or self.current[2] == SLOTS:
            name = f"/torch_{os.getpid()}_{random.getrandbits(31)}_{len(self.files)}"
            fd = os.open(f"/dev/shm{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(fd, HEADER + 8 * SLOTS)
            page = Segment(fd, HEADER + 8 * SLOTS)
            os.close(fd)
            struct.pack_into("<i", page, 0, 1)
            self.current = [name.encode(), page, 0]
            self.files.append(self.current)
        name, page, slot = self.current
        struct.pack_into("<q", page, HEADER + 8 * slot, 1)
        self.current[2] += 1
        self.limbo.append((page, slot, storage))
        return name, slot

    def collect(self):
        for name, page, used in self.files:
            if not any(struct.unpack_from(f"<{used}q", page, HEADER)) and struct.unpack_from("<i", page)[0] == 1:
                os.unlink(b"/dev/shm" + name)


counters = Counters()
shared = {}


def in_memory(tensor):
    """Moves a contiguous tensor to memory that can be shared."""
    size = max(tensor.numel() * tensor.element_size(), 1)
    fd = os.memfd_create("stand-in", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    segment = Segment(fd, size)
    moved = torch.frombuffer(segment, dtype=tensor.dtype, count=tensor.numel()).copy_(tensor.reshape(-1))
    segment.fd, segment.address = fd, moved.data_ptr()
    shared[segment.address] = fd
    return moved


def share_cuda(storage):
    """What `_share_cuda_` gives, for a storage of this process; what lies elsewhere is copied and kept."""
    if storage.data_ptr() not in shared:
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        storage = in_memory(flat).untyped_storage()
    handle = handle_of(shared[storage.data_ptr()], storage.nbytes())
    name, slot = counters.next(storage)
    return 0, b"\x02c" + handle, storage.nbytes(), 0, name, slot, bytes(64), False


def main():
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    torch.UntypedStorage._new_shared_cuda = staticmethod(new_shared_cuda)
    torch.UntypedStorage._share_cuda_ = share_cuda
    torch.empty = (lambda empty: lambda *size, device="cpu", **rest: empty(*size, **rest))(torch.empty)
    torch.cuda.init = torch.cuda.synchronize = lambda: None
    torch.cuda.ipc_collect = counters.collect
    # Devices have no uuid that PyTorch knows.
    torch.version.hip = "none"
    import gpu_tensors

    gpu_tensors.uuid_of = lambda device: None
    source = open(script).read()
    module = {"__name__": "__main__", "__file__": script}
    code = compile(source.replace('DEVICE = "cuda"', 'DEVICE = "cpu"'), script, "exec")
    if script.endswith("trainer.py"):
        gpu_tensors.pattern = (lambda pattern: lambda *arguments: in_memory(pattern(*arguments)))(gpu_tensors.pattern)
    exec(code, module)


if __name__ == "__main__":
    main()
