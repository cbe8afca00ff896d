"""Forked children: every attribute and method of every object of the parent, found by introspection."""

import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from conftest import DEVICE, WATCHDOG

import gpu_ipc

Tries = dict[str, Callable[[Any], object]]

# What only data is looked at for: it says nothing of memory, and reads none.
ARRAY = {"dtype", "shape", "strides", "nbytes", "read_only", "__len__", "__dlpack_device__"}
DATA: dict[type, set[str]] = {
    gpu_ipc.Session: {"path", "id", "device", "closed", "resized_storages", "ticket"},
    gpu_ipc.Participant: {"device"},
    gpu_ipc.Received: ARRAY | {"meta", "device"},
    gpu_ipc.Block: ARRAY,
    gpu_ipc.Loan: {"nbytes", "released"},
    gpu_ipc.Broker: set(),
    gpu_ipc.Object: set(),
    gpu_ipc.ObjectWriter: set(),
    gpu_ipc.Pool: set(),
    gpu_ipc.PoolReader: set(),
    gpu_ipc.Part: ARRAY | {"without_read_only_flag"},
    gpu_ipc.Scratch: set(),
    gpu_ipc.Stream: {"handle", "__cuda_stream__"},
}
# What gives up the child's own reference, and so does nothing, as a drop does nothing.
DROPS = {(gpu_ipc.Received, "release"), (gpu_ipc.Block, "release")}
# Of every object, whatever it is.
OBJECTS = set(dir(object)) | {"__module__", "__enter__", "__exit__", "__weakref__", "__release_buffer__", "__reduce__"}


def drained(attempt: Any) -> object:
    """Run a coroutine or an asynchronous iterator to its first wait."""
    step = attempt.__anext__() if hasattr(attempt, "__anext__") else attempt
    return step.send(None)


def tries(all_of: dict[str, Any]) -> dict[type, Tries]:
    """How each call that needs arguments is made. The others are made without, and properties read."""
    session, block, participant = all_of["session"], all_of["block"], all_of["participant"]
    descriptor, array, writer = all_of["descriptor"], all_of["array"], all_of["writer"]
    buffers: Tries = {"__buffer__": memoryview, "__dlpack__": lambda it: it.__dlpack__()}
    cuda: Tries = {"__cuda_array_interface__": lambda it: it.__cuda_array_interface__}
    arrays: Tries = buffers | {"record_stream": lambda it: it.record_stream(0), "torch": lambda it: it.torch()} | cuda
    parts: Tries = {
        "__getitem__": lambda it: it["a"],
        "__contains__": lambda it: "a" in it,
        "record_stream": lambda it: it.record_stream(0),
    }
    return {
        gpu_ipc.Session: {
            "alloc": lambda it: it.alloc(1),
            "share": lambda it: it.share(array),
            "share_many": lambda it: it.share_many([array]),
            "lend": lambda it: it.lend(array),
            "block_of": lambda it: it.block_of(array),
            "revoke": lambda it: it.revoke(descriptor),
            "deposit": lambda it: it.deposit(bytes(16), 0),
            "fetch": lambda it: it.fetch(bytes(16)),
            "cancel": lambda it: it.cancel(block, descriptor),
            "wait_for_participants": lambda it: it.wait_for_participants(9, WATCHDOG),
            "wait_for_participants_async": lambda it: drained(it.wait_for_participants_async(9)),
            "wait_released_async": lambda it: drained(it.wait_released_async(block)),
            "notices_async": lambda it: drained(it.notices_async()),
            "participant_name": lambda it: it.participant_name(all_of["id"]),
        },
        gpu_ipc.Participant: {
            "claim": lambda it: it.claim(descriptor),
            "try_claim": lambda it: it.try_claim(descriptor),
            "claim_many": lambda it: it.claim_many([descriptor]),
            "claim_tensors": lambda it: it.claim_tensors([descriptor]),
            "deposit": lambda it: it.deposit(bytes(16), 0),
            "fetch": lambda it: it.fetch(bytes(16)),
            "claim_async": lambda it: drained(it.claim_async(descriptor)),
            "notices_async": lambda it: drained(it.notices_async()),
        },
        gpu_ipc.Received: arrays,
        gpu_ipc.Block: {name: how for name, how in arrays.items() if name != "torch"},
        gpu_ipc.Loan: {},
        gpu_ipc.Part: {name: how for name, how in arrays.items() if name != "record_stream"},
        gpu_ipc.Broker: {
            "put": lambda it: it.put("m", {"a": array}),
            "create": lambda it: it.create("m", {"a": array}),
            "scratch": lambda it: it.scratch("m", {"a": array}),
            "open": lambda it: it.open("model"),
            "pull": lambda it: it.pull("model"),
            "watch": lambda it: it.watch("model", 9, WATCHDOG),
            "watch_async": lambda it: drained(it.watch_async("model", 9)),
            "remove": lambda it: it.remove("model"),
            "create_pool": lambda it: it.create_pool("p", {"a": array}, 8192),
            "adopt": lambda it: it.adopt("free"),
            "read_pool": lambda it: it.read_pool("kv"),
        },
        gpu_ipc.Pool: parts
        | {
            "invalidate": lambda it: it.invalidate(1),
            "seal": lambda it: it.seal(0, bytes(16), 0),
            "seal_all": lambda it: it.seal_all([(0, bytes(16))], 0),
        },
        gpu_ipc.PoolReader: parts
        | {
            "look": lambda it: it.look(0),
            "is_still": lambda it: it.is_still(all_of["sealed"]),
            "read_whole": lambda it: it.read_whole(0, "a", 0, 1),
        },
        gpu_ipc.Object: parts | {"copy_part": lambda it: it.copy_part("a", writer)},
        gpu_ipc.ObjectWriter: {name: how for name, how in parts.items() if name != "__contains__"},
        gpu_ipc.Scratch: parts,
        gpu_ipc.Stream: {},
    }


def attempts(it: object, how: Tries) -> list[tuple[str, Callable[[], object]]]:
    """List every attribute and method of an object that is no data."""
    kind, found = type(it), []
    names = set(dir(kind)) - OBJECTS - DATA[kind]
    if "__dlpack__" in names:
        # Before Python 3.12 a class does not show that it has it.
        names.add("__buffer__")
    for name in sorted(names):
        if (kind, name) in DROPS or (name.startswith("_") and not name.startswith("__")):
            continue
        if name in how:
            attempt: Callable[[], object] = lambda name=name: how[name](it)
        elif callable(getattr(kind, name)):
            attempt = lambda name=name: getattr(it, name)()
        else:
            attempt = lambda name=name: getattr(it, name)
        found.append((f"{kind.__name__}.{name}", attempt))
    unknown = how.keys() - names
    assert not unknown, f"{kind.__name__} has none of {unknown}"
    return found


@pytest.mark.skipif(not DEVICE.startswith("host"), reason="the buffer protocol is for host memory")
def test_every_attribute_and_method_of_a_parents_object_says_forked(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, broker: gpu_ipc.Broker, tmp_path: pathlib.Path
) -> None:
    block = session.alloc(64)
    descriptor = session.share(block, to=participant.id)
    broker.put("model", {"a": numpy.zeros(4)})
    model, writer = broker.open("model"), broker.create("filled", {"a": numpy.zeros(4)})
    scratch = broker.scratch("scratch", {"a": numpy.zeros(4)})
    broker.create_pool("free", {"a": numpy.zeros(4)}, 8192).close()
    pool, stream = broker.create_pool("kv", {"a": numpy.zeros(4)}, 8192), gpu_ipc.Stream(DEVICE)
    for number in (0, 1):
        pool.invalidate(number)
    pool.seal(1, bytes(16), stream)
    stream.synchronize()
    all_of: dict[str, Any] = {
        "session": session,
        "block": block,
        "loan": session.lend(session.alloc(8)),
        "participant": participant,
        "id": participant.id,
        "descriptor": descriptor,
        "received": participant.claim(descriptor),
        "array": numpy.asarray(block),
        "broker": broker,
        "object": model,
        "part": model["a"],
        "writer": writer,
        "scratch": scratch,
        "pool": pool,
        "pool_reader": broker.read_pool("kv"),
        "sealed": pool.sealed()[0],
        "stream": stream,
    }
    how = tries(all_of)
    objects = [it for it in all_of.values() if type(it) in DATA]
    assert {type(it) for it in objects} == DATA.keys() == how.keys()
    calls = [call for it in objects for call in attempts(it, how[type(it)])]
    assert len(calls) > 90, "the classes show what they have"
    # A class that is none of these has nothing of a process in it, or is missing here.
    plain = {"Collected", "Descriptor", "Descriptors", "Detected", "Device", "Holder", "Notice", "ParticipantId"}
    plain |= {"Sealed", "SessionNotice", "SessionReport", "ShutdownReport", "SourceUsage", "Stats", "Ticket"}
    classes = {name for name in gpu_ipc.__all__ if isinstance(vars(gpu_ipc)[name], type)}
    errors = {name for name in classes if issubclass(vars(gpu_ipc)[name], Exception)}
    assert classes - errors - plain == {kind.__name__ for kind in DATA}
    # The parent is busy: a call that takes a lock of its hangs in some children.
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            gpu_ipc.Stream(DEVICE).synchronize()
            session.share(session.alloc(8))
            session.stats()

    busy = [threading.Thread(target=work) for _ in range(2)]
    for thread in busy:
        thread.start()
    log = tmp_path / "log"
    try:
        for _ in range(10):
            in_a_child(calls, objects, log)
    finally:
        ended.set()
        for thread in busy:
            thread.join()
    assert block.outstanding == 1 and all_of["received"].state == "ready"


def in_a_child(calls: list[tuple[str, Callable[[], object]]], objects: list[object], log: pathlib.Path) -> None:
    """Fork, make every call there, and fail with what was let through."""
    # A child that hangs is ended by the alarm, and says before each call which it is.
    child = os.fork()
    if child == 0:
        wrong, name = [], ""
        try:
            import signal

            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WATCHDOG))
            for name, attempt in calls:
                log.write_text(f"hung or died in {name}")
                try:
                    given = attempt()
                    wrong.append(f"{name} gave {given!r}")
                except gpu_ipc.Forked as error:
                    if "in the child" not in str(error):
                        wrong.append(f"{name}: {error}")
                except BaseException as error:
                    wrong.append(f"{name} raised {error!r}")
            silent = (gpu_ipc.Loan, gpu_ipc.Part, gpu_ipc.ObjectWriter, gpu_ipc.Stream)
            shown = [repr(it) for it in objects if type(it) not in silent]
            wrong += [text for text in shown if "of the parent process" not in text]
            log.write_text("\n".join(wrong))
        finally:
            os._exit(bool(wrong))
    assert os.waitpid(child, 0)[1] == 0, log.read_text()
