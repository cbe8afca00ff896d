"""Named tensors in buckets of a session: packed by a sender, lent to readers, and packed again once no lease is left.

The plugs of `vllm` and `verl` send weights so. A message is JSON: the names, element types and shapes of a bucket's tensors, and
the bucket's descriptor. Each tensor begins at the next multiple of 256 bytes.
"""

import base64
import dataclasses
import math
import select
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeAlias

import torch

import gpu_ipc

GIB = 1 << 30
# PyTorch's classes, which are not there where types are checked.
Tensor: TypeAlias = Any
Device: TypeAlias = Any
DType: TypeAlias = Any
_ALIGNMENT = 256
# Bytes of tensors that are kept until they are copied together, since a source may have gathered each for this copy alone.
_CHUNK = 64 << 20
# Seconds between two looks at all buckets while none is free.
_LOOK = 0.02
# Seconds within which the proof of a death follows the error that it caused.
_PROOF = 2.0


@dataclasses.dataclass
class Message:
    """What a bucket holds, and the descriptor by which it is claimed."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket: str
    more: bool = False

    def __post_init__(self) -> None:
        counts = {len(self.names), len(self.dtype_names), len(self.shapes)}
        if len(counts) > 1:
            raise gpu_ipc.Invalid(
                f"the message has {len(self.names)} names, {len(self.dtype_names)} element types and {len(self.shapes)} shapes:"
                " the sender gives one of each for every tensor"
            )


@dataclasses.dataclass
class _Bucket:
    block: gpu_ipc.Block
    bytes: Tensor
    loan: gpu_ipc.Loan | None = None
    # The tensors that were packed last: an update has those of the one before it.
    packed: list[Tensor] = dataclasses.field(default_factory=list)

    def is_free(self, timeout: float = 0.0) -> bool:
        """Wait until no reader has a lease on it."""
        if self.loan is not None:
            try:
                self.loan.wait_released(timeout)
            except gpu_ipc.Timeout:
                return False
            self.loan = None
        return True


class Sender:
    """The session of a sender, and its buckets.

    Args:
        device: where the buckets lie.
        bucket_bytes: the size of a bucket; a larger tensor has one of its own.
        buckets: how many there are at most.
        patience: seconds to wait for a bucket that readers hold.
    """

    def __init__(self, device: Device, *, bucket_bytes: int = GIB, buckets: int = 4, patience: float = 60.0) -> None:
        if bucket_bytes < _ALIGNMENT or buckets < 1:
            raise gpu_ipc.Invalid(
                f"there are {buckets} buckets of {bucket_bytes} bytes, but must be at least 1 of {_ALIGNMENT} bytes"
            )
        self.session = gpu_ipc.Session(name_of(device), ttl=None)
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._most = buckets
        self._patience = patience
        self._buckets: list[_Bucket] = []

    def messages(self, named: Iterable[tuple[str, Tensor]], total: int | None = None) -> Generator[dict[str, Any]]:
        """Pack tensors, and yield the message of each bucket once its copies are queued on the current stream.

        A bucket is lent until the next step. Then it is packed again as soon as the last lease on it has ended.

        Args:
            named: names and tensors. All of a bucket are on its device, or are copied there.
            total: about how many bytes they take together; a smaller bucket than otherwise suffices for fewer.

        Raises:
            OutOfMemory: the device has no room for a bucket.
            Timeout: readers hold all buckets; the text names them.
        """
        size = min(self._bucket_bytes, max(total or self._bucket_bytes, _ALIGNMENT))
        packing: _Packing | None = None
        for name, tensor in named:
            if packing is not None and not packing.has_room(tensor.nbytes):
                yield from self._lent(packing, more=True)
                packing = None
            if packing is None:
                packing = _Packing(self._take(max(size, room(tensor.nbytes))))
            packing.add(name, tensor.detach())
        if packing is not None:
            yield from self._lent(packing, more=False)

    def lost(self) -> list[gpu_ipc.SessionNotice]:
        """Return the notices of readers that have died since the last call, once the proof of a death is there."""
        end = time.monotonic() + _PROOF
        while True:
            died = [notice for notice in self.session.notices() if notice.kind == "left" and notice.how != "goodbye"]
            left = end - time.monotonic()
            if died or left <= 0:
                return died
            select.select([self.session.fileno()], [], [], left)

    def close(self) -> None:
        """End the session. Readers keep what they hold."""
        self._buckets.clear()
        self.session.close()

    def _lent(self, packing: "_Packing", *, more: bool) -> Generator[dict[str, Any]]:
        packing.copy()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        with self.session.lend(packing.bucket.block, stream=stream) as loan:
            packing.bucket.loan = loan
            bucket = base64.b64encode(loan.share(self.session.ticket(None))).decode()
            yield vars(Message(packing.names, packing.dtype_names, packing.shapes, bucket, more))

    def _take(self, nbytes: int) -> _Bucket:
        end = time.monotonic() + self._patience
        while True:
            free = [bucket for bucket in self._buckets if bucket.is_free()]
            for bucket in free:
                if bucket.bytes.numel() >= nbytes:
                    return bucket
            if free:
                # Another model, or a tensor that is larger than a bucket.
                self._buckets.remove(free[0])
            if len(self._buckets) < self._most:
                block = self.session.alloc(nbytes)
                self._buckets.append(_Bucket(block, torch.from_dlpack(block)[: nbytes // _ALIGNMENT * _ALIGNMENT]))
                continue
            if (left := end - time.monotonic()) <= 0:
                raise gpu_ipc.Timeout(
                    f"no bucket of {self._most} came back within {self._patience} s: {self._holders()}. Raise `buckets`, or end"
                    " the readers"
                )
            self._buckets[0].is_free(min(left, _LOOK))

    def _holders(self) -> str:
        held = []
        for holder in self.session.stats().holders:
            if not holder.leases:
                continue
            name = self.session.participant_name(holder.participant) or holder.command
            held.append(f"{name!r} (process {holder.pid}) holds {holder.bytes} bytes")
        return ", ".join(held) or "nothing holds a lease any more"


class _Views:
    """Tensors one after another on the memory of a bucket, as its sender and its readers lay them."""

    def __init__(self, bucket: Tensor) -> None:
        self._bucket = bucket[: bucket.numel() // _ALIGNMENT * _ALIGNMENT]
        self._of: dict[DType, Tensor] = {}
        self.at = 0

    def next(self, dtype: DType, shape: Sequence[int]) -> Tensor:
        count = math.prod(shape)
        after = self.at + room(count * dtype.itemsize)
        if min(shape, default=0) < 0 or after > self._bucket.numel():
            raise gpu_ipc.Mismatch(
                f"a tensor {list(shape)} of {dtype} at byte {self.at} does not fit into its bucket of {self._bucket.numel()}"
                " bytes: send it again, by one version of gpu_ipc on both sides"
            )
        if (view := self._of.get(dtype)) is None:
            view = self._of[dtype] = self._bucket.view(dtype)
        begin, self.at = self.at // dtype.itemsize, after
        return view.narrow(0, begin, count).view(tuple(shape))


class _Packing:
    """A bucket that is being filled."""

    def __init__(self, bucket: _Bucket) -> None:
        self.bucket = bucket
        self.names: list[str] = []
        self.dtype_names: list[str] = []
        self.shapes: list[list[int]] = []
        self._views = _Views(bucket.bytes)
        self._into: list[Tensor] = []
        self._from: list[Tensor] = []
        self._copied = 0

    def has_room(self, nbytes: int) -> bool:
        return bool(self._views.at + room(nbytes) <= self.bucket.bytes.numel())

    def add(self, name: str, tensor: Tensor) -> None:
        self.names.append(name)
        self.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self._into.append(self._place(tensor))
        self._from.append(tensor)
        if self._views.at - self._copied >= _CHUNK:
            self.copy()

    def _place(self, tensor: Tensor) -> Tensor:
        packed, place = self.bucket.packed, len(self.names) - 1
        if place < len(packed) and packed[place].dtype == tensor.dtype and packed[place].shape == tensor.shape:
            self._views.at += room(tensor.nbytes)
            return packed[place]
        packed[place:] = [self._views.next(tensor.dtype, tensor.shape)]
        return packed[place]

    def copy(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._into, self._from, non_blocking=True)
        self._into, self._from, self._copied = [], [], self._views.at


class Reader:
    """A reader's connection to the session of a sender.

    Args:
        path: the session's path.
        uuid: the sender's device.
        device: the reader's.
        name: what the sender calls this reader when it dies.
    """

    def __init__(self, path: str, uuid: str, device: Device, name: str) -> None:
        # Memory of a GPU that is hidden here is mapped on the reader's own.
        is_hidden = uuid not in [one.uuid for one in gpu_ipc.detect().devices]
        self.participant = gpu_ipc.connect(path, device=name_of(device) if is_hidden else None, name=name)
        self._device = device

    def bucket(self, message: Message, timeout: float | None = 60.0) -> Tensor:
        """Claim the bucket of a message. Its lease ends with the last tensor on it."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        received = self.participant.claim(base64.b64decode(message.bucket), stream=stream, timeout=timeout)
        return received.torch()

    def close(self) -> None:
        self.participant.close()


def unpacked(bucket: Tensor, message: Message) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of a bucket, on its memory.

    Raises:
        Mismatch: they do not fit into it, or an element type is none of PyTorch's.
    """
    views = _Views(bucket)
    dtypes = [_dtype(name) for name in message.dtype_names]
    made = [views.next(dtype, shape) for dtype, shape in zip(dtypes, message.shapes, strict=True)]
    return list(zip(message.names, made, strict=True))


def name_of(device: Device) -> str:
    """Return what gpu_ipc calls a device of PyTorch."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    if device.type == "cpu":
        return "host:0"
    raise gpu_ipc.Unsupported(f"the device is {device}, but must be a GPU by CUDA or HIP, or the CPU")


def room(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a bucket."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _dtype(name: str) -> DType:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise gpu_ipc.Mismatch(f"the element type is {name!r}, but must be one of PyTorch's, such as 'bfloat16'")
    return dtype
