"""Opens the tensors that `torch_producer` shares, and says what it finds. Started by that program:

    torch_producer --python python3 --consumer testing/torch/consumer.py

It needs nothing but PyTorch. Frames are those of gpu_tensors.py; each command is a text frame:

    command          frames after it                        what it does
    look SEED        tensor, its elements in order          compares both with the pattern, lets go
    bytes            tensor, its elements in order          compares these alone, lets go
    fill SEED        tensor                                 compares, fills the view with ones, lets go
    hold SEED        tensor                                 compares, and keeps the tensor
    again            -                                      compares all that is kept once more
    drop             -                                      lets go of all that is kept
    pair SEED        two tensors                            compares both; they must have one address
    stream COUNT     COUNT tensors, each answered           compares, keeping the last eight
    lost             tensor                                 does not open it
    end              -                                      ends

Each is answered by `ok` or by what is wrong.
"""

import collections
import os
import sys

import torch

from gpu_tensors import Wire, decode, differs


def elements(tensor):
    """Returns the bytes of a view's elements, one after the other."""
    dense = tensor.clone(memory_format=torch.contiguous_format).cpu()
    flat = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage(), 0, (dense.untyped_storage().nbytes(),), (1,))
    return bytes(flat.tolist())


class Consumer:
    def __init__(self, wire):
        self.wire = wire
        self.kept = []

    def tensors(self, count, others=0):
        """Reads frames to the last before it opens any, so that an error leaves none to be taken for a command."""
        frames = [self.wire.receive() for _ in range(count + others)]
        return [decode(frame) for frame in frames[:count]] + frames[count:]

    def run(self, command, *arguments):
        return getattr(self, command)(*(int(argument) for argument in arguments))

    def look(self, seed):
        tensor, expected = self.tensors(1, 1)
        wrong = differs(tensor, seed)
        if wrong is None and expected and elements(tensor) != expected:
            wrong = f"the elements of a view of {tuple(tensor.shape)} by {tensor.stride()} differ"
        return wrong

    def bytes(self):
        tensor, expected = self.tensors(1, 1)
        return None if elements(tensor) == expected else "the elements differ"

    def fill(self, seed):
        (tensor,) = self.tensors(1)
        wrong = differs(tensor, seed)
        tensor.fill_(1)
        return wrong

    def hold(self, seed):
        (tensor,) = self.tensors(1)
        self.kept.append((tensor, seed))
        return differs(tensor, seed)

    def again(self):
        return next((wrong for wrong in (differs(*kept) for kept in self.kept) if wrong), None)

    def drop(self):
        self.kept.clear()

    def pair(self, seed):
        one, other = self.tensors(2)
        if one.data_ptr() != other.data_ptr():
            return "one block is at two addresses"
        return differs(one, seed) or differs(other, seed)

    def stream(self, count):
        last = collections.deque(maxlen=8)
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for number in range(count):
            last.append(decode(self.wire.receive()))
            # The producer fills bytes; nothing here waits for the GPU.
            wrong += (last[-1] != number % 251).sum()
            self.wire.send("ok")
        last.clear()
        return None if int(wrong) == 0 else f"{int(wrong)} elements differ"

    def lost(self):
        self.wire.receive()


def main():
    wire = Wire.connect(sys.argv[1])
    wire.send(f"{os.getpid()} {torch.__version__}")
    consumer = Consumer(wire)
    while (line := wire.text()) not in (None, "end"):
        try:
            wrong = consumer.run(*line.split())
        except Exception as error:  # The producer reports it, and ends the conversation.
            wrong = f"{line}: {type(error).__name__}: {error}"
        wire.send(wrong or "ok")
    consumer.drop()
    if line == "end":
        wire.send("ok")


DEVICE = "cuda"

if __name__ == "__main__":
    main()
