"""A trainer's tensors on one GPU, to four processes on the others: one copy to each GPU that is shared there, beside NCCL.

    python broadcast.py --out FILE [--tensors 1000] [--nbytes BYTES] [--rounds 5]

NCCL lets a GPU be in a communicator once. So processes that share a GPU are in one communicator each with the trainer, and get their
copies one after the other: all at once they would wait for each other in turns of the GPU. Where every process has a GPU of its own,
one broadcast serves all. Every tensor's last word is compared in each round.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from report import row
from speed import MIB, hear

import gpu_ipc

READERS = 4


def contents(tensor: int, turn: int) -> int:
    """Make the byte that a tensor is filled with in a round: its neighbours have others."""
    return (tensor + turn) % 251 + 1


def compare(tensors: list[torch.Tensor], turn: int) -> None:
    found = torch.stack([tensor[-1] for tensor in tensors]).tolist()
    wrong = [number for number, byte in enumerate(found) if byte != contents(number, turn)]
    assert not wrong, f"round {turn}: tensors {wrong[:5]} of {len(found)} are wrong"


def places(devices: list[str]) -> list[str]:
    """Return the device of each reader: all but the trainer's in turn."""
    return [devices[1 + reader % (len(devices) - 1)] for reader in range(READERS)]


def join(options: argparse.Namespace, rank: int, devices: list[str]) -> list[Any]:
    """Join NCCL's world, and return the groups: each has the trainer and one reader of each other GPU."""
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{options.folder}/world", rank=rank, world_size=READERS + 1
    )
    others = len(devices) - 1
    members = [range(first, min(first + others, READERS + 1)) for first in range(1, READERS + 1, others)]
    return [(ranks, torch.distributed.new_group([0, *ranks])) for ranks in members]


def broadcast(tensors: list[torch.Tensor], group: Any) -> None:
    """Do one side of a broadcast: queue all tensors, and wait for the last."""
    work = [torch.distributed.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]
    for one in work:
        one.wait()


def read(options: argparse.Namespace, reader: int, devices: list[str], pipe: Any, mates: list[Any]) -> None:
    """Be a reader. The first on a GPU copies and shares with its mates there; `mates` has a pipe to each, or to the first."""
    device = places(devices)[reader]
    is_first = device not in places(devices)[:reader]
    torch.cuda.set_device(device)
    if is_first:
        own = [torch.zeros(options.nbytes, dtype=torch.uint8, device=device) for _ in range(options.tensors)]
        torch.cuda.synchronize(device)
        with gpu_ipc.Session(device) as session, gpu_ipc.connect(f"{options.folder}/trainer") as trainer:
            for mate in mates:
                mate.send(session.path)
            to = [hear(mate) for mate in mates]
            pipe.send(trainer.id)
            while (work := hear(pipe)) is not None:
                turn, descriptors = work
                tensors = trainer.claim_tensors(descriptors)
                for mine, tensor in zip(own, tensors, strict=True):
                    mine.copy_(tensor, non_blocking=True)
                if mates:
                    for mate, shared in zip(mates, session.share_many(own, to=to), strict=True):
                        mate.send((turn, shared))
                torch.cuda.synchronize(devices[0])
                torch.cuda.synchronize(device)
                pipe.send("done")
                compare(own, turn)
                del tensors, tensor
                for mate in mates:
                    assert hear(mate) == "let go"
                pipe.send("compared")
            for mate in mates:
                mate.send(None)
                assert hear(mate) == "gone"
        del own, mine
    else:
        (first,) = mates
        with gpu_ipc.connect(hear(first)) as participant:
            first.send(participant.id)
            pipe.send(None)
            while (work := hear(first)) is not None:
                turn, descriptors = work
                tensors = participant.claim_tensors(descriptors)
                torch.cuda.synchronize(device)
                pipe.send("done")
                compare(tensors, turn)
                del tensors
                pipe.send("compared")
                first.send("let go")
        first.send("gone")
    torch.cuda.empty_cache()
    pipe.send("freed")
    assert hear(pipe) == "NCCL"
    group = next(group for ranks, group in join(options, reader + 1, devices) if reader + 1 in ranks)
    own = [torch.zeros(options.nbytes, dtype=torch.uint8, device=device) for _ in range(options.tensors)]
    torch.cuda.synchronize(device)
    pipe.send("joined")
    while (turn := hear(pipe)) is not None:
        broadcast(own, group)
        torch.cuda.synchronize(device)
        pipe.send("done")
        compare(own, turn)
        pipe.send("compared")
    torch.distributed.destroy_process_group()


def all_say(pipes: list[Any], what: str) -> None:
    for pipe in pipes:
        said = hear(pipe)
        assert said == what, f"{said!r}, not {what!r}"


def train(options: argparse.Namespace, devices: list[str]) -> dict[str, Any]:
    """Be the trainer, and measure. Times in nanoseconds; bytes of the other GPUs."""
    context = torch.multiprocessing.get_context("spawn")
    where = places(devices)
    pipes, ends = zip(*[context.Pipe() for _ in range(READERS)], strict=True)
    mates: list[list[Any]] = [[] for _ in range(READERS)]
    for reader in range(READERS):
        first = where.index(where[reader])
        if first != reader:
            to_mate, to_first = context.Pipe()
            mates[first].append(to_mate)
            mates[reader].append(to_first)
    firsts = [pipes[where.index(device)] for device in dict.fromkeys(where)]
    device = devices[0]
    torch.cuda.set_device(device)
    state = [torch.zeros(options.nbytes, dtype=torch.uint8, device=device) for _ in range(options.tensors)]

    def fill(turn: int) -> None:
        for number, tensor in enumerate(state):
            tensor.fill_(contents(number, turn))
        torch.cuda.synchronize(device)

    def taken(before: list[int]) -> int:
        return sum(before) - sum(torch.cuda.mem_get_info(other)[0] for other in devices[1:])

    before = [torch.cuda.mem_get_info(other)[0] for other in devices[1:]]
    result: dict[str, Any] = {"ours": [], "theirs": []}
    with gpu_ipc.Session(device, f"{options.folder}/trainer") as session:
        for reader in range(READERS):
            arguments = (options, reader, devices, ends[reader], mates[reader])
            context.Process(target=read, args=arguments, daemon=True).start()
            # A reader that goes away is heard of.
            for end in (ends[reader], *mates[reader]):
                end.close()
        ids = [hear(pipe) for pipe in pipes]
        to = [one for one in ids if one is not None]
        for turn in range(options.rounds + 1):
            fill(turn)
            begin = time.perf_counter_ns()
            for pipe, shared in zip(firsts, session.share_many(state, to=to), strict=True):
                pipe.send((turn, shared))
            all_say(list(pipes), "done")
            result["ours"].append(time.perf_counter_ns() - begin)
            all_say(list(pipes), "compared")
        result["ours bytes"] = taken(before)
        for pipe in firsts:
            pipe.send(None)
        all_say(list(pipes), "freed")
    for pipe in pipes:
        pipe.send("NCCL")
    groups = join(options, 0, devices)
    all_say(list(pipes), "joined")
    for turn in range(options.rounds + 1):
        fill(turn + 7)
        begin = time.perf_counter_ns()
        for ranks, group in groups:
            some = [pipes[rank - 1] for rank in ranks]
            for pipe in some:
                pipe.send(turn + 7)
            broadcast(state, group)
            all_say(some, "done")
        result["theirs"].append(time.perf_counter_ns() - begin)
        all_say(list(pipes), "compared")
    result["theirs bytes"] = taken(before)
    for pipe in pipes:
        pipe.send(None)
    torch.distributed.destroy_process_group()
    return result


def rows_of(options: argparse.Namespace, devices: list[str], result: dict[str, Any]) -> list[dict[str, Any]]:
    size = f"{options.tensors}x{options.nbytes // MIB}MiB"
    groups = -(-READERS // (len(devices) - 1))
    beside = f"NCCL, {groups} broadcasts after each other" if groups > 1 else "NCCL, one broadcast"
    note = (
        f"{READERS} processes on {len(devices) - 1} other GPUs; the first round, which maps and connects, took "
        f"{result['ours'][0] / 1e6:.1f} ms, and {result['theirs'][0] / 1e6:.1f} by NCCL"
    )
    what = "a trainer's tensors to processes on the other GPUs, until the last has them"
    memory = "memory of the other GPUs, contexts and buffers too"
    ours, theirs = [result["ours bytes"]], [result["theirs bytes"]]
    return [
        row(f"broadcast-time/{size}", what, beside, result["ours"][1:], result["theirs"][1:], at=options.nbytes, note=note),
        row(f"broadcast-memory/{size}", memory, beside, ours, theirs, at=options.nbytes, unit="B"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--nbytes", type=int, default=4 * MIB)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # Multicast over NVLink takes a manager of the fabric that not every machine lets a container reach; and one host is enough.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if len(devices) < 2:
        rows = [row("broadcast-time/1", "", "NCCL", [], [], at=0, note="one GPU: no broadcast")]
    else:
        with tempfile.TemporaryDirectory() as options.folder:
            rows = rows_of(options, devices, train(options, devices))
    Path(options.out).write_text(json.dumps(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
