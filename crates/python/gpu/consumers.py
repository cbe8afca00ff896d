"""The consumers of the checks: processes that are started ahead, so that nobody waits for an import or a context.

A process cannot open its own memory, so whatever is claimed is claimed by one of these. They are children of a fork server
that has imported PyTorch once and has never touched the GPU; each makes its context while the checks go on.
"""

import contextlib
import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

import gpu_ipc

# Who takes longer hangs.
PATIENCE = 60.0

# Each context takes half a GiB, and the driver makes few of them at a time.
AHEAD = 6


def told_of(tensor: torch.Tensor) -> Any:
    """Tell shape, strides, type and bytes of a tensor."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), bits


# What runs in the consumer.


def as_cupy(received: gpu_ipc.Received) -> torch.Tensor:
    import cupy

    return torch.from_dlpack(cupy.from_dlpack(received))


def as_cupy_by_interface(received: gpu_ipc.Received) -> torch.Tensor:
    import cupy

    return torch.from_dlpack(cupy.asarray(received))


def as_jax(received: gpu_ipc.Received) -> torch.Tensor:
    import jax

    return torch.from_dlpack(jax.dlpack.from_dlpack(received))


def as_torch_by_interface(received: gpu_ipc.Received) -> torch.Tensor:
    return torch.as_tensor(received, device="cuda")


# From what was claimed to a tensor, through each library.
WAYS: dict[str, Callable[[gpu_ipc.Received], torch.Tensor]] = {
    "torch": gpu_ipc.Received.torch,
    "torch.from_dlpack": torch.from_dlpack,
    "torch by the CUDA array interface": as_torch_by_interface,
    "cupy": as_cupy,
    "cupy by the CUDA array interface": as_cupy_by_interface,
    "jax": as_jax,
}


class Role:
    """What a consumer does when it is asked; each public method is a command."""

    def __init__(self) -> None:
        self.participant: gpu_ipc.Participant | None = None
        self.kept: list[torch.Tensor] = []

    def _joined(self) -> gpu_ipc.Participant:
        assert self.participant is not None, "the consumer is in no session"
        return self.participant

    def join(self, path: str) -> gpu_ipc.ParticipantId:
        """Connect to a session."""
        self.participant = gpu_ipc.connect(path)
        return self.participant.id

    def read(self, descriptor: Any, way: str, keep: bool = False) -> Any:
        """Claim, make a tensor by one of the ways, and tell of it."""
        if way == "claim_tensors":
            [made] = self._joined().claim_tensors([descriptor], timeout=PATIENCE)
        else:
            made = WAYS[way](self._joined().claim(descriptor, timeout=PATIENCE))
        if keep:
            self.kept.append(made)
        return told_of(made)

    def read_kept(self) -> list[bytes]:
        """Tell the bytes of what was kept."""
        return [told_of(one)[3] for one in self.kept]

    def drop(self) -> None:
        """Drop what was kept."""
        self.kept.clear()

    def mappings(self) -> int:
        """Tell how many regions are mapped."""
        return self._joined().mappings

    def leave(self) -> None:
        """Drop everything and say goodbye."""
        self.kept.clear()
        self._joined().close()
        self.participant = None


def serve(device: str, pipe: Any) -> None:
    """Be a consumer: do what the other side asks, until it hangs up."""
    role = Role()
    # The context, and the first kernels.
    told_of(torch.ones(16, device="cpu" if device.startswith("host") else device))
    pipe.send("warm")
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", getattr(role, name)(*arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


# What the producer has of it.


class Consumer:
    """A consumer, as the producer sees it."""

    id: gpu_ipc.ParticipantId

    def __init__(self, context: Any, device: str) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(device, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.is_warm = False

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE), f"consumer {self.process.pid} hangs"
        return self.pipe.recv()

    def join(self, session: gpu_ipc.Session) -> None:
        """Let it connect to a session, once it is warm."""
        if not self.is_warm:
            assert self.hear() == "warm"
            self.is_warm = True
        self.id = self("join", session.path)

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, arguments))
        how, told = self.hear()
        assert how == "done", told
        return told

    def kill(self) -> None:
        """Kill it, wherever it is."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def end(self) -> None:
        """Hang up, and see it end well."""
        if not self.is_warm:
            assert self.hear() == "warm"
        self.pipe.close()
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0, f"the consumer ended with {self.process.exitcode}"


class Pool:
    """Consumers that nobody uses at the moment."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "gpu_ipc"])
        self.spare: deque[Consumer] = deque()

    def prepare(self, count: int) -> None:
        """Start consumers until at least `count` are there."""
        while len(self.spare) < count:
            self.spare.append(Consumer(self.context, self.device))

    def take(self, session: gpu_ipc.Session) -> Consumer:
        """Let the one that was started first connect to a session."""
        self.prepare(1)
        consumer = self.spare.popleft()
        consumer.join(session)
        return consumer

    @contextlib.contextmanager
    def lent(self, session: gpu_ipc.Session) -> Iterator[Consumer]:
        """Take one, and give it back when it has left the session; one that failed is killed."""
        consumer = self.take(session)
        try:
            yield consumer
            consumer("leave")
        except BaseException:
            consumer.kill()
            raise
        self.spare.appendleft(consumer)

    def end(self) -> None:
        """End them all."""
        while self.spare:
            self.spare.popleft().end()
