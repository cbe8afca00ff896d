"""A trainer hands a state dict to inference processes, round after round, and one of them is killed in each.

    python weights.py [--device host:0] [--rounds 5] [--tensors 1000] [--elements 256] [--readers 4]

The tensors are not copied, nobody counts by hand, and the memory stays flat: what the dead reader held comes back when its
death is proven. Descriptors travel through ordinary pipes; their pickles are their bytes.
"""

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import gpu_ipc
from arrays import Array, full, holds, taken

# Who takes longer hangs.
PATIENCE = 120.0


def value_of(generation: int, place: int) -> float:
    """Tell the tensors of all generations apart."""
    return float(generation * 10_000 + place)


class Reader:
    """An inference process, as the trainer sees it."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=infer, args=(path, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.id: gpu_ipc.ParticipantId = self.hear()

    def hear(self) -> gpu_ipc.ParticipantId:
        """Wait for the reader's next message, its number in the session."""
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(f"reader {self.process.pid} hangs")
        told: gpu_ipc.ParticipantId = self.pipe.recv()
        return told

    def kill(self) -> None:
        """Kill it, wherever it is."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def infer(path: str, pipe: Connection) -> None:
    """Serve from a generation until the next one is there."""
    weights: dict[str, Array] = {}
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        while True:
            try:
                generation, names, descriptors = pipe.recv()
            except EOFError:
                return
            received = participant.claim_many(descriptors, timeout=PATIENCE)
            # The generation before is dropped here, and its leases end.
            weights = dict(zip(names, map(taken, received), strict=True))
            del received
            for place, tensor in enumerate(weights.values()):
                assert holds(tensor, value_of(generation, place)), f"tensor {place} of generation {generation}"
            pipe.send(participant.id)


def settle(session: gpu_ipc.Session, most: int) -> None:
    """Wait until no more than `most` bytes are held."""
    end = time.monotonic() + PATIENCE
    while True:
        session.collect()
        stats = session.stats()
        if stats.live_bytes <= most and stats.quarantined == 0:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"memory is not flat: {stats}")
        time.sleep(0.001)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=256)
    parser.add_argument("--readers", type=int, default=4)
    options = parser.parse_args()
    killed = 0
    with gpu_ipc.Session(options.device) as session:
        readers = [Reader(session.path) for _ in range(options.readers)]
        generation_bytes = 4 * options.elements * options.tensors
        state: dict[str, Array] = {}
        for generation in range(1, options.rounds + 1):
            # Each generation has memory of its own: readers serve from the one before while they take it.
            state = {
                f"layer.{place}": full(session, options.elements, value_of(generation, place))
                for place in range(options.tensors)
            }
            victim = generation % options.readers
            for place, descriptors in enumerate(
                session.share_many(state.values(), to=[reader.id for reader in readers])
            ):
                readers[place].pipe.send((generation, list(state), descriptors))
            # It has claimed all of it, some or nothing: nobody waits to see.
            readers[victim].kill()
            killed += 1
            for place, reader in enumerate(readers):
                if place != victim:
                    reader.hear()
            # All others serve from this generation, so it alone is held.
            settle(session, generation_bytes)
            readers[victim] = Reader(session.path)
        for reader in readers:
            reader.kill()
        state.clear()
        settle(session, 0)
        stats = session.stats()
    print(
        f"weights: {options.rounds} generations of {options.tensors} tensors to {options.readers} readers, {killed} killed "
        f"and replaced; {stats.deaths} deaths proven, {stats.live_bytes} bytes held at the end"
    )


if __name__ == "__main__":
    main()
