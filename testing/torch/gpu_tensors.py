"""Tensors of the GPU over a Unix socket, with nothing but PyTorch.

A frame is its length (4 bytes, little-endian), then its content. A tensor's content:

    bytes       content
    0..4        GPTM
    4           version, 1
    5           type of the elements (DTYPES below)
    6           dimensions, at most 64
    7           bit 0: the uuid is known; bit 1: the event is to be waited for
    8..24       uuid of the device, or zeros
    24..28      number of the device where it was sent
    28..32      bytes of the segment handle; 0 for a storage of no bytes
    32..40      bytes of the storage
    40..48      offset of the storage in its segment, in bytes
    48..56      counter in the counter file
    56..58      bytes of the counter file's name
    58..60      bytes of the event handle, 0 or 64
    60..64      zero
    64..72      offset of the tensor in the storage, in elements
    72..        shape and strides, 8 bytes a number; segment handle; name; event handle

All numbers are little-endian and unsigned. Any other frame is text, in UTF-8. One tensor's message is for one receiver,
once: PyTorch's counter stands for one opening.
"""

import socket
import struct

import torch

HEADER = struct.Struct("<4sBBBB16sIIQQQHHIQ")
HAS_UUID, HAS_EVENT = 1, 2
DTYPES = [
    (1, torch.uint8),
    (2, torch.int8),
    (3, torch.int16),
    (4, torch.int32),
    (5, torch.int64),
    (6, torch.float16),
    (7, torch.bfloat16),
    (8, torch.float32),
    (9, torch.float64),
    (10, torch.bool),
    (11, torch.complex64),
    (12, torch.complex128),
]
DTYPE_OF = dict(DTYPES)
CODE_OF = {dtype: code for code, dtype in DTYPES}


def uuid_of(device):
    """Returns the 16 bytes that name a device whatever its number is, or None where PyTorch does not tell."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # HIP's is text in the same place, which names something else.
    return bytes(uuid.bytes) if uuid is not None and torch.version.hip is None else None


def encode(tensor):
    """Shares a tensor: the bytes are for one receiver, once, and count until it lets go."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        fields = (tensor.device.index or 0, None, 0, 0, None, 0, None, False)
    else:
        fields = storage._share_cuda_()
    return pack(fields, uuid_of(tensor.device), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


def pack(fields, uuid, dtype, offset, shape, strides):
    """Writes the bytes of the module's table."""
    device, handle, size, at, name, slot, event, wait = fields
    handle, name, event = handle or b"", name or b"", event or b""
    flags = (HAS_UUID if uuid else 0) | (HAS_EVENT if wait else 0)
    head = HEADER.pack(
        b"GPTM", 1, CODE_OF[dtype], len(shape), flags, uuid or bytes(16), device, len(handle), size, at, slot or 0,
        len(name), len(event), 0, offset,
    )  # fmt: skip
    return head + struct.pack(f"<{2 * len(shape)}Q", *shape, *strides) + handle + name + event


def unpack(frame):
    """Reads the bytes of the module's table: (fields, uuid, dtype, offset, shape, strides)."""
    (magic, version, code, dims, flags, uuid, device, handle, size, at, slot, name, event, _, offset) = (
        HEADER.unpack_from(frame)
    )
    if magic != b"GPTM" or version != 1:
        raise ValueError(f"not a tensor's message of version 1: {frame[:5]!r}")
    if len(frame) != HEADER.size + 16 * dims + handle + name + event:
        raise ValueError(f"{len(frame)} bytes are not what the lengths say")
    numbers = struct.unpack_from(f"<{2 * dims}Q", frame, HEADER.size)
    rest = frame[HEADER.size + 16 * dims :]
    parts = rest[:handle], rest[handle : handle + name], rest[handle + name :]
    fields = (device, parts[0] or None, size, at, parts[1] or None, slot, parts[2] or None, bool(flags & HAS_EVENT))
    return fields, uuid if flags & HAS_UUID else None, DTYPE_OF[code], offset, numbers[:dims], numbers[dims:]


def decode(frame):
    """Opens a shared tensor; the current stream waits for the sender's work. Dropping the tensor lets it go."""
    fields, uuid, dtype, offset, shape, strides = unpack(frame)
    device = fields[0]
    if uuid is not None:
        known = [index for index in range(torch.cuda.device_count()) if uuid_of(index) == uuid]
        if known:
            device = known[0]
        elif torch.version.hip is None:
            raise RuntimeError(f"no device here has the uuid {uuid.hex()}: see CUDA_VISIBLE_DEVICES")
    torch.cuda.init()
    if fields[1] is None or fields[2] == 0:
        storage = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").untyped_storage()
    else:
        storage = torch.UntypedStorage._new_shared_cuda(device, *fields[1:])
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


class Wire:
    """Frames over a connected socket."""

    def __init__(self, connection):
        self.connection = connection
        connection.settimeout(120)

    @classmethod
    def connect(cls, path):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection)

    def send(self, content):
        content = content.encode() if isinstance(content, str) else content
        self.connection.sendall(struct.pack("<I", len(content)) + content)

    def receive(self):
        """Returns a frame, or None after the last."""
        head = self.read(4)
        return None if head is None else self.read(struct.unpack("<I", head)[0])

    def text(self):
        frame = self.receive()
        return None if frame is None else frame.decode()

    def read(self, count):
        parts = b""
        while len(parts) < count:
            part = self.connection.recv(count - len(parts))
            if not part:
                return None
            parts += part
        return parts


def pattern(first, count, seed, dtype, device):
    """Returns what elements first to first + count of a storage hold in these examples: small whole numbers."""
    values = (torch.arange(first, first + count, device=device, dtype=torch.int64) * 31 + seed) % 97
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


def differs(tensor, seed):
    """Compares a view with the pattern of its storage; returns what is wrong, or None."""
    step = 1 << 24
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), 0, (size,), (1,))
    for first in range(0, size, step):
        count = min(step, size - first)
        if not torch.equal(flat[first : first + count], pattern(first, count, seed, tensor.dtype, tensor.device)):
            return f"elements {first} to {first + count} of the storage differ"
    if size > step:
        return None
    whole = pattern(0, size, seed, tensor.dtype, tensor.device)
    expected = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return None if torch.equal(tensor, expected) else "the view differs"
