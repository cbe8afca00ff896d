"""A tensor transport for Ray, `docs/integrations/RAY.md`: actors of a node share tensors by lease, without a copy.

Call `register`, and then name the transport: ``@ray.method(tensor_transport="GPU_IPC")``. The source lends what a method
returns, and each receiver claims it. A loan ends with Ray's last reference, and a lease with its receiver's process.
"""

import dataclasses
import os
import threading
import time
from importlib import import_module
from typing import Any

import ray
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
from ray.experimental.rdt import util

import gpu_ipc

NAME = "GPU_IPC"
# Seconds after which a pending claim looks whether Ray has aborted its transfer.
_ABORT_POLL = 0.5
# Ray makes it at first use, without a lock: of two threads each would wait for what the other's has.
_ = ray._private.worker.global_worker.rdt_manager


@dataclasses.dataclass
class Metadata(TensorTransportMetadata):  # type: ignore[misc]
    """What the receivers of an object are sent."""

    data_type: type = object
    node: str = ""
    pid: int = 0
    session: str = ""
    gpu: str = ""
    descriptors: bytes = b""

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)
        # Ray registers a transport on an actor once, so a restarted receiver lacks it until its first object comes.
        register(self.data_type)


class Transport(TensorTransportManager):  # type: ignore[misc]
    """The transport of a process; Ray makes it, and calls it from several threads."""

    limit: int | None = None
    room: float = 30.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, gpu_ipc.Session] = {}
        self._participants: dict[str, gpu_ipc.Participant] = {}
        self._lent: dict[str, tuple[Metadata, list[gpu_ipc.Loan]]] = {}
        self._receiving: list[tuple[str, threading.Event]] = []

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        """Lend the tensors of an object. A second call for the same object returns what the first one did."""
        if lent := self._lent.get(obj_id):
            return lent[0]
        devices = {_device(tensor) for tensor in rdt_object}
        if len(devices) > 1:
            raise ValueError(f"the tensors of one object are on {sorted(devices)}: return one object for each device")
        metadata = Metadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device="cpu" if devices <= {"host:0"} else "cuda",
            data_type=util.get_transport_data_type(NAME),
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
        )
        # Dropped loans are released, as after an error.
        loans = [self._lend(self._session(_device(tensor)), tensor) for tensor in rdt_object]
        if loans:
            session = self._session(devices.pop())
            metadata.session, metadata.gpu = session.path, session.device.uuid
            metadata.descriptors = bytes(gpu_ipc.Descriptors([loan.share(session.ticket(None)) for loan in loans]))
        self._lent[obj_id] = metadata, loans
        return metadata

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Metadata,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Claim the tensors of an object, or copy them into buffers. ObjectLostError: the source does not give them."""
        metadata, here = tensor_transport_metadata, ray.get_runtime_context().get_node_id()
        if here != metadata.node:
            raise ValueError(
                f"{NAME} shares memory within a node: the source is on {metadata.node}, the receiver on {here}. "
                'Use tensor_transport="NIXL" between nodes.'
            )
        receiving = obj_id, threading.Event()
        self._receiving.append(receiving)
        try:
            received = self._claim(metadata, receiving[1]) if metadata.descriptors else []
        except gpu_ipc.Error as error:
            text = f"{NAME}: no object from process {metadata.pid}: {error}"
            raise ray.exceptions.ObjectLostError(obj_id, b"", text) from error
        finally:
            self._receiving.remove(receiving)
        tensors = [_tensor(lease, *meta) for lease, meta in zip(received, metadata.tensor_meta, strict=True)]
        return tensors if target_buffers is None else _copy(tensors, target_buffers)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError(f"{NAME} is one-sided: receivers claim, and the source sends nothing")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """End the loan of an object. Receivers keep what they hold."""
        _, loans = self._lent.pop(obj_id, (None, []))
        for loan in loans:
            loan.release()

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """End the claims of an object that are under way. A source has nothing to end."""
        for receiving, aborted in list(self._receiving):
            if receiving == obj_id:
                aborted.set()

    def _session(self, device: str) -> gpu_ipc.Session:
        with self._lock:
            if device not in self._sessions:
                # Without a time to live: Ray's references end loans.
                self._sessions[device] = gpu_ipc.Session(device, ttl=None, limit=self.limit)
            return self._sessions[device]

    def _lend(self, session: gpu_ipc.Session, tensor: Any) -> gpu_ipc.Loan:
        if _device(tensor) != "host:0":
            return session.lend(tensor.detach(), stream=_stream(tensor))
        data = memoryview(_bytes(tensor))
        try:
            block = session.alloc(max(data.nbytes, 1), timeout=self.room)
        except gpu_ipc.OutOfMemory as error:
            error.add_note(f"Waited {self.room} s; Ray references {len(self._lent)} objects of this process.")
            raise
        memoryview(block)[: data.nbytes] = data
        return session.lend(block)

    def _claim(self, metadata: Metadata, aborted: threading.Event) -> list[gpu_ipc.Received]:
        # Ray never frees what arrives after its own time limit.
        end = time.monotonic() + ray._private.ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS / 2
        participant = self._participant(metadata, end)
        descriptors = gpu_ipc.Descriptors(metadata.descriptors)
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                # Without a stream this waits for the source's work, so that any stream may use the tensors.
                return participant.claim_many(descriptors, timeout=min(left, _ABORT_POLL))
            except gpu_ipc.Timeout:
                if aborted.is_set() or left <= _ABORT_POLL:
                    raise

    def _participant(self, metadata: Metadata, end: float) -> gpu_ipc.Participant:
        with self._lock:
            # What came from a source that is gone stays good without its participant.
            self._participants = {path: kept for path, kept in self._participants.items() if not kept.is_producer_gone}
            if kept := self._participants.get(metadata.session):
                return kept
        if metadata.gpu not in [device.uuid for device in gpu_ipc.detect().devices]:
            raise ValueError(f"{NAME}: GPU {metadata.gpu} is hidden here; set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 for both actors")
        is_actor = ray._private.worker.global_worker.mode == ray.WORKER_MODE
        new = gpu_ipc.connect(
            metadata.session,
            timeout=max(0.0, end - time.monotonic()),
            name=f"ray actor {ray.get_runtime_context().get_actor_id()}" if is_actor else "ray driver",
            # As the arrays of Ray's own object store; PyTorch has no tensors that are read-only.
            read_only=metadata.data_type.__module__ == "numpy",
        )
        with self._lock:
            return self._participants.setdefault(metadata.session, new)


def _device(tensor: Any) -> str:
    return f"cuda:{tensor.device.index}" if getattr(tensor, "is_cuda", False) else "host:0"


def _stream(tensor: Any) -> Any:
    """Return the stream behind which a tensor is ready, or None once all work of its device is done."""
    import torch

    worker = ray._private.worker.global_worker.core_worker
    # Ray extracts what asyncio actors return on another thread than the task's, which has another current stream.
    if worker.current_actor_is_asyncio() or worker.get_current_task_id().is_nil():
        return torch.cuda.synchronize(tensor.device)
    return torch.cuda.current_stream(tensor.device)


def _bytes(tensor: Any) -> Any:
    import numpy

    if hasattr(tensor, "detach"):
        tensor = tensor.detach().contiguous().reshape(-1).view(import_module("torch").uint8).numpy()
    return numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8)


def _tensor(received: gpu_ipc.Received, shape: Any, dtype: Any) -> Any:
    """Return the tensor that a source lent; one of the CPU comes as its bytes."""
    if type(dtype).__module__ == "torch":
        tensor = received.torch()
        return tensor if tensor.is_cuda else tensor[: shape.numel() * dtype.itemsize].view(dtype).reshape(shape)
    import numpy

    return numpy.asarray(received)[: numpy.prod(shape, dtype=int) * dtype.itemsize].view(dtype).reshape(shape)


def _copy(tensors: list[Any], buffers: list[Any]) -> list[Any]:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer[...] = tensor
        if _device(buffer) != "host:0":
            import torch

            # The lease ends with this call, and any stream may use the buffer.
            torch.cuda.current_stream(buffer.device).synchronize()
    return buffers


def register(data_type: type | None = None, *, limit: int | None = None, room: float = 30.0) -> None:
    """Register the transport with Ray in this process, once; later calls change nothing.

    Call it before the class of an actor that names the transport is defined.

    Args:
        data_type: the class of the tensors; `torch.Tensor` unless said.
        limit: the most bytes that tensors of the CPU take in each process; unlimited unless said.
        room: seconds that a source waits for room under the limit.
    """
    if NAME in util.transport_manager_info:
        return
    # Ray sends a class that no module names by value, and its attributes with it.
    kind = Transport if limit is None else type("Limited", (Transport,), {"limit": limit, "room": room})
    util.register_tensor_transport(NAME, ["cuda", "cpu"], kind, data_type or import_module("torch").Tensor)
