"""A prefill process hands the KV blocks of each request to the decode process that takes it.

    python kv_handoff.py [--device host:0] [--requests 20] [--layers 32] [--decoders 2]

A request is one message: the descriptors of its layers' keys and values, tickets that one decoder claims, in one call. The
decoder whose turn it is to die takes a request and dies with it: the request is given to another, and the dead one's blocks
come back.
"""

import argparse
import multiprocessing
import os
import queue
import signal
from multiprocessing.queues import Queue
from typing import Any

import gpu_ipc
from arrays import Array, full, holds, taken

ELEMENTS = 4096
# Who takes longer hangs.
PATIENCE = 120.0


def value_of(request: int, layer: int) -> float:
    """Tell the layers of all requests apart."""
    return float(request * 1000 + layer)


def decode(path: str, requests: "Queue[Any]", answers: "Queue[Any]") -> None:
    """Take requests, and answer each; die in the middle of one that says so."""
    with gpu_ipc.connect(path) as participant:
        while (work := requests.get()) is not None:
            request, descriptors, dies = work
            layers = [taken(one) for one in participant.claim_many(descriptors, timeout=PATIENCE)]
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            good = all(holds(layer, value_of(request, place)) for place, layer in enumerate(layers))
            del layers
            answers.put((request, good))


def main() -> None:
    """Prefill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--decoders", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    killed = 0
    with gpu_ipc.Session(options.device) as session:
        answers: Queue[Any] = context.Queue()

        def start() -> "tuple[Any, Queue[Any]]":
            requests: Queue[Any] = context.Queue()
            process = context.Process(target=decode, args=(session.path, requests, answers), daemon=True)
            process.start()
            return process, requests

        decoders = [start() for _ in range(options.decoders)]
        session.wait_for_participants(options.decoders, PATIENCE)
        for request in range(options.requests):
            layers: list[Array] = [
                full(session, ELEMENTS, value_of(request, layer)) for layer in range(options.layers)
            ]
            place = request % options.decoders
            dies = request % 10 == 9
            decoders[place][1].put((request, session.share_many(layers), dies))
            if dies:
                decoders[place][0].join(PATIENCE)
                killed += 1
                decoders[place] = start()
                decoders[place][1].put((request, session.share_many(layers), False))
            try:
                answer = answers.get(timeout=PATIENCE)
            except queue.Empty:
                raise TimeoutError(f"request {request} is not answered") from None
            assert answer == (request, True), answer
            # The blocks are this process' again once the decoder, or the proof of its death, has let them go.
            del layers
        for process, requests in decoders:
            requests.put(None)
            process.join(PATIENCE)
        report = session.close(timeout=PATIENCE)
        assert report.clean, report
    print(
        f"kv_handoff: {options.requests} requests of {options.layers} layers to {options.decoders} decoders, {killed} of them "
        "killed in the middle of one; nothing is held at the end"
    )


if __name__ == "__main__":
    main()
