"""A first program, for any machine: a process shares an array with another one, which reads it.

    python first.py

Needs nothing but gpu_ipc. Its array is a block of shared memory, `host:0`, which is a buffer; with PyTorch and `cuda:0` it is a tensor.
"""

import subprocess
import sys

import gpu_ipc

# Who takes longer hangs.
PATIENCE = 120.0


def read(path: str) -> None:
    """Be the other process: claim what arrives on standard input, and print the sum of its 32-bit numbers."""
    with gpu_ipc.connect(path) as participant:
        descriptor = bytes.fromhex(sys.stdin.readline())
        received = participant.claim(descriptor, timeout=PATIENCE)
        print(sum(memoryview(received).cast("B").cast("i")))
        received.release()


def main() -> None:
    with gpu_ipc.Session("host:0") as session:
        command = [sys.executable, __file__, session.path]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        to = session.wait_for_participants(1, PATIENCE)[0]
        block = session.alloc(4 * 1000)
        numbers = memoryview(block).cast("B").cast("i")
        for index in range(1000):
            numbers[index] = index
        descriptor = session.share(block, to=to)
        told, _ = reader.communicate(bytes(descriptor).hex() + "\n", PATIENCE)
        assert reader.returncode == 0, f"the reader ended with {reader.returncode}"
        assert int(told) == sum(range(1000)), f"the reader read {told}"
        print(f"another process read 1,000 numbers of this one's memory: their sum is {int(told):,}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        read(sys.argv[1])
    else:
        main()
