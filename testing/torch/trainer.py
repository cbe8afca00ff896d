"""Shares tensors of an unmodified PyTorch with a consumer in Rust.

    python3 testing/torch/trainer.py --consumer PATH/torch_consumer [--backend cuda] [--count 10000] [--big-mib 1024]

It binds a socket, starts the consumer, and sends it tensors of every type, views, one of no bytes and a large one; then
many in a row. It needs nothing but PyTorch. Frames are those of gpu_tensors.py, commands those of consumer.py. Each check
is a line; the last line sums up.

With `expandable` as the last argument it sends from expandable segments alone; PYTORCH_CUDA_ALLOC_CONF must ask for them.
"""

import argparse
import ctypes
import gc
import os
import socket
import subprocess
import sys
import tempfile

import torch

from consumer import elements
from gpu_tensors import DTYPES, Wire, encode, pattern, unpack

DEVICE = "cuda"
WINDOW = 32


class Trainer:
    def __init__(self, wire):
        self.wire = wire

    def filled(self, dtype, count, seed):
        return pattern(0, count, seed, dtype, DEVICE)

    def agree(self):
        answer = self.wire.text()
        if answer != "ok":
            raise RuntimeError(f"the consumer says: {answer}")

    def tell(self, command, *tensors):
        self.wire.send(command)
        for tensor in tensors:
            self.wire.send(encode(tensor))

    def look(self, tensor, seed):
        self.tell(f"look {seed}", tensor)
        self.wire.send(elements(tensor) if tensor.numel() < 1 << 16 else b"")
        self.agree()

    def view(self, make, dtype, seed=5):
        base = self.filled(dtype, 120, seed).reshape(6, 20)
        self.look(make(base), seed)

    def no_bytes(self):
        self.look(torch.empty(0, 3, device=DEVICE), 0)

    def simple(self):
        base = self.filled(torch.uint8, 400, 1).reshape(20, 20)
        self.tell("fill 1", base[:, 1])
        self.agree()
        # The answer comes after the counter, and that after the consumer's work.
        if not bool((base == 1).all()):
            raise RuntimeError("the consumer's fill is not seen")

    def pair(self):
        base = self.filled(torch.int32, 1000, 2)
        self.tell("pair 2", base, base)
        self.agree()

    def chunks(self):
        """Two chunks of one storage."""
        one, other = self.filled(torch.float32, 400, 2).chunk(2)
        self.tell("pair 2", one, other)
        self.agree()

    def mixed(self):
        for dtype, count in (torch.float32, 1000), (torch.uint8, 1001), (torch.float64, 10):
            self.tell("hold 9", self.filled(dtype, count, 9))
            self.agree()
        self.let_go()

    def five(self):
        """Sends five and drops each at once: PyTorch must keep them for the consumer."""
        for seed in range(5):
            self.tell(f"hold {seed}", self.filled(torch.float32, 1 << 18, seed))
            self.agree()
        self.let_go()

    def let_go(self):
        for command in "again", "drop":
            self.wire.send(command)
            self.agree()

    def ordered(self, size):
        """Sends while the GPU is busy with the tensor: who does not wait for the event reads zeros."""
        late = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
        scratch = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        for number in range(100):
            scratch.fill_(number)
        late.fill_(7)
        self.tell("bytes", late)
        self.wire.send(bytes([7]) * 4096)
        self.agree()

    def big(self, size):
        tensor = torch.empty(size // 4, dtype=torch.float32, device=DEVICE)
        step = 97 << 18
        for first in range(0, tensor.numel(), step):
            part = tensor[first : first + step]
            part.copy_(pattern(first, part.numel(), 3, torch.float32, DEVICE))
        self.look(tensor, 3)

    def states(self):
        """A model's tensors, 100 times."""
        model = torch.nn.LSTM(8, 8, 2).to(DEVICE)
        for _ in range(100):
            for tensor in model.state_dict().values():
                self.tell("bytes", tensor)
                self.wire.send(elements(tensor))
                self.agree()

    def declined(self):
        frame = encode(self.filled(torch.uint8, 4096, 4))
        for part in "decline", frame:
            self.wire.send(part)
        self.agree()
        # What this PyTorch sends, for whoever reads the log.
        return frame.hex()

    def row(self, count):
        self.wire.send(f"stream {count}")
        for number in range(count):
            if number >= WINDOW:
                self.agree()
            self.wire.send(encode(torch.full((4096,), number % 251, dtype=torch.uint8, device=DEVICE)))
        for _ in range(min(count, WINDOW)):
            self.agree()
        self.agree()

    def expandable(self, count, chunks):
        """Sends a tensor of an expandable segment, in so many chunks at least: it is opened, or refused with the remedy."""
        tensor = self.filled(torch.uint8, count, 6)
        frame = encode(tensor)
        for part in "look 6", frame, elements(tensor) if count < 1 << 16 else b"":
            self.wire.send(part)
        answer, handle = self.wire.text(), unpack(frame)[0][1]
        if handle[1:2] != b"e":
            raise RuntimeError(f"the segment is of kind {handle[1:2]!r}")
        if (found := int.from_bytes(handle[18:26], "little")) < chunks:
            raise RuntimeError(f"the tensor lies in {found} chunks, not in {chunks}: {answer}")
        if answer == "ok":
            return f"opened: {frame.hex()}"
        if "expandable_segments:False" not in answer:
            raise RuntimeError(answer)
        return f"refused: {answer}: {frame.hex()}"


class Checks:
    def __init__(self):
        self.passed = self.failed = 0

    def note(self, name, check, *arguments):
        try:
            told = check(*arguments)
            self.passed += 1
            print(f"ok      {name}{': ' + told if told else ''}", flush=True)
        except Exception as error:
            self.failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)


def start(options):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tensors")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        listener.settimeout(120)
        child = subprocess.Popen([options.consumer, path, options.backend])
        connection, _ = listener.accept()
    wire = Wire(connection)
    wire.text()
    return child, wire


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--consumer", required=True)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--big-mib", type=int, default=1024)
    parser.add_argument("what", nargs="?", choices=["all", "expandable"], default="all")
    options = parser.parse_args()
    child, wire = start(options)
    trainer, checks = Trainer(wire), Checks()
    print(f"trainer: PyTorch {torch.__version__} shares with a consumer in Rust", flush=True)
    if options.what == "expandable":
        # PR_SET_PTRACER: the consumer may take this process' file descriptors where Yama asks for a permission.
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(child.pid), 0, 0, 0)
        checks.note("expandable segments (test_p2p_ipc_expandable_segments)", trainer.expandable, 4096, 1)
        # Its chunks of 20 MiB are opened one by one, and lie side by side.
        checks.note("an expandable segment of several chunks, 100 MiB", trainer.expandable, 100 << 20, 4)
    else:
        everything(trainer, checks, options)
    checks.note("the consumer ends, every counter decreased", end, child, wire)
    checks.note("no file is left in /dev/shm, no memory allocated (leak_checker)", nothing_left, child.pid)
    print(
        f"trainer: PyTorch {torch.__version__}: {checks.passed} checks passed, {checks.failed} failed, 0 skipped",
        flush=True,
    )
    sys.exit(checks.failed != 0)


def everything(trainer, checks, options):
    for seed, (_, dtype) in enumerate(DTYPES):
        make = lambda: trainer.look(trainer.filled(dtype, 120, seed).reshape(6, 5, 4), seed)
        checks.note(f"{str(dtype)[6:]} contiguous", make)
    for name, make, dtype in [
        ("a column, x[:, 1]", lambda x: x[:, 1], torch.float32),
        ("transposed, x.t()", lambda x: x.t(), torch.float16),
        ("rows from an offset, x[2:5]", lambda x: x[2:5], torch.int64),
        ("every third, x[::3, 1::2]", lambda x: x[::3, 1::2], torch.bfloat16),
        ("expanded, stride 0", lambda x: x[0, 3:10].expand(4, 7), torch.uint8),
        ("a scalar", lambda x: x[5, 19], torch.float64),
        ("a view of no elements", lambda x: x[:0, :3], torch.complex64),
    ]:
        checks.note(f"view: {name}", trainer.view, make, dtype)
    checks.note("a tensor of no bytes (test_empty_tensor_sharing_cuda)", trainer.no_bytes)
    checks.note("the consumer's fill is seen here (test_cuda_simple)", trainer.simple)
    checks.note("one tensor sent twice is at one address (test_cuda_simple)", trainer.pair)
    checks.note("two chunks of one storage (test_rebuild_cuda_tensor)", trainer.chunks)
    checks.note("mixed types in one segment (test_mixed_types_cuda_sharing)", trainer.mixed)
    checks.note("five sent and dropped at once (test_cuda_memory_allocation)", trainer.five)
    size = options.big_mib << 20
    name = f"work queued before the send is waited for by its event (test_event_multiprocess), {options.big_mib} MiB"
    checks.note(name, trainer.ordered, size)
    checks.note(f"{options.big_mib} MiB", trainer.big, size)
    checks.note("a model's tensors, 100 times (test_cuda_ipc_deadlock)", trainer.states)
    checks.note("a tensor is let go without being opened", trainer.declined)
    name = f"{options.count} tensors in a row, files rotated (test_cuda_send_many)"
    checks.note(name, trainer.row, options.count)


def end(child, wire):
    wire.send("end")
    if (answer := wire.text()) != "ok":
        raise RuntimeError(answer)
    if child.wait(120) != 0:
        raise RuntimeError(f"the consumer ended with {child.returncode}")


def nothing_left(consumer):
    # Models are cycles.
    gc.collect()
    torch.cuda.synchronize()
    # PyTorch's file goes when it finds all of its counters at zero.
    torch.cuda.ipc_collect()
    pids = os.getpid(), consumer
    left = [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in pids))]
    if left:
        raise RuntimeError(f"{left}: counters are not at zero")
    if (kept := torch.cuda.memory_allocated()) != 0:
        raise RuntimeError(f"{kept} bytes are still allocated")


if __name__ == "__main__":
    main()
