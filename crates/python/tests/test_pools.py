"""Pools of a broker: held by one process, killed and adopted, sealed in stream order, read beside their holder."""

import contextlib
import ctypes
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping

import numpy
import pytest
from conftest import DEVICE, WATCHDOG, ends, interrupted, said, serve, until

import gpu_ipc

BLOCKS = 16
BLOCK = 4096
# What each holder of these tests has of the library, and its pool.
HOLDER = """
import sys, signal, numpy, gpu_ipc
from gpu_ipc import _gpu_ipc
broker = gpu_ipc.connect_broker(sys.argv[1], {device!r}, name="the holder")
pool = broker.{how}
stream = gpu_ipc.Stream({device!r})
kv = numpy.from_dlpack(pool["kv"])

def put(block, fill):
    pool.invalidate(block)
    kv[block] = fill
    pool.seal(block, bytes([fill] * 16), stream)
"""
CREATE = f"create_pool('kv', {{'kv': ('uint8', ({BLOCKS}, {BLOCK}))}}, gpu_ipc.journal_bytes({BLOCKS}))"


def key(fill: int) -> bytes:
    return bytes([fill] * 16)


def create(broker: gpu_ipc.Broker, name: str = "kv") -> gpu_ipc.Pool:
    return broker.create_pool(name, {"kv": ("uint8", (BLOCKS, BLOCK))}, gpu_ipc.journal_bytes(BLOCKS))


def put(pool: gpu_ipc.Pool, stream: gpu_ipc.Stream, block: int, fill: int) -> None:
    pool.invalidate(block)
    numpy.from_dlpack(pool["kv"])[block] = fill
    pool.seal(block, key(fill), stream)


def adopted(broker: gpu_ipc.Broker) -> gpu_ipc.Pool:
    """Adopt as soon as the last holder's death is proven, and its GPU work can have ended."""
    held: list[gpu_ipc.Pool] = []

    def can() -> bool:
        try:
            held.append(broker.adopt("kv"))
        except gpu_ipc.Refused as error:
            assert "is held by" in str(error) or "its GPU work may go on" in str(error), error
        return bool(held)

    until(can, "the pool can be adopted")
    return held[0]


def whole(pool: gpu_ipc.Pool) -> dict[int, int]:
    """Return what each sealed block is filled with, after a look at every byte of it."""
    kv = numpy.from_dlpack(pool["kv"])
    found = {}
    for sealed in pool.sealed():
        fill = sealed.key[0]
        assert sealed.key == key(fill) and (kv[sealed.block] == fill).all(), f"{sealed} is listed and not whole"
        found[sealed.block] = fill
    return found


class Holder:
    """A process that holds the pool."""

    def __init__(self, directory: pathlib.Path, program: str, how: str = CREATE) -> None:
        program = HOLDER.format(device=DEVICE, how=how) + program
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True
        )

    def says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line + "\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def stream() -> Iterator[gpu_ipc.Stream]:
    yield gpu_ipc.Stream(DEVICE)


def test_the_next_holder_finds_what_was_sealed(broker: gpu_ipc.Broker, stream: gpu_ipc.Stream) -> None:
    parts = {"kv": ("uint8", (BLOCKS, BLOCK)), "state": {"table": numpy.zeros((2, 3), numpy.int32)}}
    pool = broker.create_pool("kv", parts, gpu_ipc.journal_bytes(300), meta=b"layer 0", groups=[["kv"]])
    assert (pool.name, pool.generation, pool.previous, pool.meta) == ("kv", 1, "never", b"layer 0")
    assert pool.blocks >= 300 and pool.sealed() == [] and "kv generation 1" in repr(pool)
    assert isinstance(pool, Mapping) and pool.keys() == ["kv", "state/table"] == list(pool) and len(pool) == 2
    assert "kv" in pool and "no" not in pool and [name for name, _ in pool.items()] == pool.keys()
    with pytest.raises(KeyError):
        pool["no"]
    # Each group is a region, and every part lies in one.
    regions = pool.regions
    assert len(regions) == 2 and [part.read_only for part in pool.values()] == [False, False]
    for part in pool.values():
        assert any(at <= part.data_ptr and part.data_ptr + part.nbytes <= at + size for at, size in regions)
    del part
    numpy.from_dlpack(pool["state/table"])[:] = 7
    for block in range(5):
        put(pool, stream, block, block + 1)
    pool.invalidate(2)
    pool.invalidate(9)
    pool.record_stream(stream)
    pool.close(stream)
    pool.close()
    assert "closed" in repr(pool)
    with pytest.raises(gpu_ipc.Invalid, match="adopt it again"):
        pool.sealed()

    (row,) = broker.listing()["objects"]
    assert (row["state"], row["pool"]["generation"]) == ("pool", 1)
    with broker.adopt("kv") as pool:
        assert (pool.generation, pool.previous, pool.meta) == (2, "closed", b"layer 0")
        assert whole(pool) == {0: 1, 1: 2, 3: 4, 4: 5}
        first, *_ = pool.sealed()
        assert (first.block, first.key, first.generation) == (0, key(1), 1) and "block 0" in repr(first)
        assert first == pool.sealed()[0] != pool.sealed()[1] and len({first, pool.sealed()[0]}) == 1
        assert (numpy.from_dlpack(pool["state/table"]) == 7).all()
        pool.invalidate(2)
        pool.invalidate(3)
        pool.seal_all([(3, key(3)), (2, bytearray(key(2)))], stream)
        pool.seal_all([], stream)
        stream.synchronize()
        assert [(of.block, of.generation) for of in pool.sealed()] == [(0, 1), (1, 1), (2, 3), (3, 2), (4, 1)]
    assert broker.adopt("kv").generation == 3


def test_the_same_addresses_are_had_again_or_refused(broker: gpu_ipc.Broker) -> None:
    pool = create(broker)
    at = pool["kv"].data_ptr
    pool.close()
    pool = broker.adopt("kv", at_same_addresses=True)
    assert pool["kv"].data_ptr == at
    # An array keeps the addresses.
    array = numpy.from_dlpack(pool["kv"])
    with pytest.raises(gpu_ipc.Refused, match="is held by"):
        broker.adopt("kv", at_same_addresses=True)
    del array
    pool.close()


def test_a_second_holder_is_refused_by_the_names_of_both(broker: gpu_ipc.Broker, directory: pathlib.Path) -> None:
    pool = create(broker)
    with gpu_ipc.connect_broker(directory, DEVICE, name="the second") as other:
        with pytest.raises(gpu_ipc.Refused, match=rf"kv is held by process {os.getpid()} \(.*the test\) .* asked for by process {os.getpid()} \(.*the second\)"):
            other.adopt("kv")
        with pytest.raises(gpu_ipc.Refused, match="kv is a pool already"):
            create(other)
        pool.close()
        assert other.adopt("kv").generation == 2


def test_what_was_under_way_at_a_death_is_not_listed(broker: gpu_ipc.Broker, directory: pathlib.Path) -> None:
    holder = Holder(
        directory,
        """
for block in range(8):
    put(block, block + 1)
stream.synchronize()
# Given up and half filled.
pool.invalidate(1)
kv[1, :100] = 99
# Filled and sealed again, behind work that does not end.
_gpu_ipc._stall(stream)
put(2, 77)
# Filled, and never sealed.
pool.invalidate(9)
kv[9] = 1
print("ready", flush=True)
while True:
    signal.pause()
""",
    )
    holder.says("ready")
    with pytest.raises(gpu_ipc.Refused, match=rf"process {holder.process.pid} \(.*the holder\)"):
        broker.adopt("kv")
    holder.kill()
    pool = adopted(broker)
    assert (pool.generation, pool.previous) == (2, "died")
    assert whole(pool) == {0: 1, 3: 4, 4: 5, 5: 6, 6: 7, 7: 8}


def test_no_half_block_is_listed_wherever_a_holder_is_killed(broker: gpu_ipc.Broker, directory: pathlib.Path) -> None:
    program = """
import random
fill = random.randrange(200)
while True:
    fill = fill % 200 + 1
    block = random.randrange(len(kv))
    pool.invalidate(block)
    for row in kv[block].reshape(8, -1):
        row[:] = fill
    pool.seal(block, bytes([fill] * 16), stream)
    if fill == 100:
        # From here on the parent kills it.
        print("goes on", flush=True)
"""
    listed, changed, last = 0, 0, dict[int, int]()
    for round in range(6):
        holder = Holder(directory, program, CREATE if round == 0 else "adopt('kv')")
        holder.says("goes on")
        # A moment that no test chose: within a few rounds over all blocks.
        spun = time.monotonic() + random.random() / 50
        while time.monotonic() < spun:
            pass
        holder.kill()
        pool = adopted(broker)
        assert (pool.generation, pool.previous) == (2 * round + 2, "died")
        found = whole(pool)
        listed, changed, last = listed + len(found), changed + (found != last), found
        pool.close()
    # At most one block of each round was under way.
    assert listed >= 6 * (BLOCKS - 1) - BLOCKS and changed == 6


def test_a_seal_and_a_close_wait_for_their_stream(broker: gpu_ipc.Broker, stream: gpu_ipc.Stream) -> None:
    from gpu_ipc import _gpu_ipc

    pool = create(broker)
    stalled = gpu_ipc.Stream(DEVICE)
    _gpu_ipc._stall(stalled)
    put(pool, stalled, 0, 1)
    put(pool, stream, 1, 2)
    stream.synchronize()
    assert [of.block for of in pool.sealed()] == [1], "the seal of block 0 is behind work that does not end"
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    until(lambda: "closed" in repr(pool), "the close begins")
    # It is held while the stream has work, so a question behind the close's first step is refused.
    with pytest.raises(gpu_ipc.Refused, match="is held by"):
        broker.adopt("kv")
    assert closing.is_alive()


def test_arrays_keep_the_hold(broker: gpu_ipc.Broker) -> None:
    pool = create(broker)
    array = numpy.from_dlpack(pool["kv"])
    with pytest.raises(gpu_ipc.Invalid, match="kept by 1 arrays, parts or tensors"):
        pool.close()
    array[3] = 3
    # After an exception the traceback has them, and the hold ends with the last.
    with pytest.raises(ZeroDivisionError), pool:
        raise ZeroDivisionError
    assert "closed" in repr(pool) and (array[3] == 3).all()
    with pytest.raises(gpu_ipc.Refused, match="is held by"):
        broker.adopt("kv")
    del array
    pool = adopted(broker)
    assert pool.previous == "closed" and (numpy.from_dlpack(pool["kv"])[3] == 3).all()


def test_a_reader_knows_what_it_copied(
    broker: gpu_ipc.Broker, directory: pathlib.Path, stream: gpu_ipc.Stream
) -> None:
    pool = broker.create_pool(
        "kv", {"kv": ("uint8", (BLOCKS, BLOCK))}, gpu_ipc.journal_bytes(BLOCKS), meta=b"m", readers="everybody"
    )
    put(pool, stream, 3, 5)
    stream.synchronize()
    with gpu_ipc.connect_broker(directory, DEVICE, name="the reader") as other:
        reader = other.read_pool("kv")
        assert isinstance(reader, Mapping) and (reader.name, reader.generation, reader.meta) == ("kv", 1, b"m")
        assert reader.blocks == pool.blocks and "kv generation 1" in repr(reader) and reader.keys() == ["kv"]
        array = numpy.from_dlpack(reader["kv"])
        assert not array.flags.writeable and (array[3] == 5).all()
        reader.record_stream(stream)
        (found,) = reader.sealed()
        assert found == reader.look(3) and reader.look(4) is None and reader.is_still(found)
        assert reader.read_whole(3, "kv", 3 * BLOCK, BLOCK) == (found, bytes([5] * BLOCK))
        assert reader.read_whole(4, "kv", 4 * BLOCK, BLOCK) is None
        pool.invalidate(3)
        assert not reader.is_still(found) and reader.look(3) is None
        assert reader.read_whole(3, "kv", 3 * BLOCK, BLOCK) is None
        put(pool, stream, 3, 6)
        stream.synchronize()
        # Whole again, with other contents than the look found.
        assert not reader.is_still(found) and reader.look(3) is not None
        assert other.watch("kv", reader.generation, 0.01) is None
        pool.close()
        pool = broker.adopt("kv")
        assert other.watch("kv", reader.generation, WATCHDOG) == 2 == pool.generation
        assert (array[3] == 6).all()
        for part, offset, nbytes in (("kv", BLOCKS * BLOCK - 1, 2), ("no", 0, 1), ("kv", 0, 1 << 60)):
            with pytest.raises(gpu_ipc.Invalid, match="range to read of a part"):
                reader.read_whole(3, part, offset, nbytes)


def test_bad_input_is_refused_by_name(broker: gpu_ipc.Broker, stream: gpu_ipc.Stream) -> None:
    parts = {"kv": ("uint8", (BLOCK,))}
    for size in (0, 4096, 8193, (64 << 20) + 4096):
        with pytest.raises(gpu_ipc.Invalid, match="multiple of 4,096"):
            broker.create_pool("p", parts, size)
    for readers in ("nobody", {"uids": [-1]}, {}, {"uids": [1], "gids": [1]}, 5):
        with pytest.raises(gpu_ipc.Invalid, match="the readers"):
            broker.create_pool("p", parts, 8192, readers=readers)  # type: ignore[arg-type]
    for numbers in ([], list(range(17))):
        with pytest.raises(gpu_ipc.Invalid, match="uids or gids"):
            broker.create_pool("p", parts, 8192, readers={"gids": numbers})
    for call in (broker.adopt, broker.read_pool):
        with pytest.raises(gpu_ipc.NotFound, match="^none is not there"):
            call("none")
        broker.put("object", {"a": numpy.zeros(1)})
        with pytest.raises(gpu_ipc.NotFound, match="object is no pool, but an object"):
            call("object")
    with pytest.raises(gpu_ipc.Refused, match="has an object, epoch"):
        create(broker, "object")
    pool = create(broker)
    with pytest.raises(gpu_ipc.Invalid, match="adopt"):
        broker.open("kv")
    for block in (pool.blocks, 1 << 32, -1):
        with pytest.raises(gpu_ipc.Invalid):
            pool.invalidate(block)
        with pytest.raises(gpu_ipc.Invalid):
            pool.seal(block, key(1), stream)
    pool.invalidate(0)
    for wrong in (b"", bytes(15), bytes(17)):
        with pytest.raises(gpu_ipc.Invalid, match="16 bytes"):
            pool.seal(0, wrong, stream)
        with pytest.raises(gpu_ipc.Invalid, match="16 bytes"):
            pool.seal_all([(0, wrong)], stream)
    with pytest.raises(gpu_ipc.Invalid, match="block 0 twice"):
        pool.seal_all([(0, key(1)), (0, key(2))], stream)
    with pytest.raises(gpu_ipc.Invalid, match="block 1, which was not invalidated"):
        pool.seal_all([(0, key(1)), (1, key(2))], stream)
    stream.synchronize()
    assert pool.sealed() == []
    pool.seal(0, key(1), stream)
    with pytest.raises(gpu_ipc.Invalid, match="not invalidated since its last seal"):
        pool.seal(0, key(1), stream)
    with pytest.raises(gpu_ipc.Invalid, match="what to pickle"):
        pool.__reduce__()
    assert gpu_ipc.journal_bytes(0) == gpu_ipc.journal_bytes(128) == 8192 < gpu_ipc.journal_bytes(129)


def test_a_holders_forked_child_does_not_end_the_hold(broker: gpu_ipc.Broker, stream: gpu_ipc.Stream) -> None:
    pool = create(broker)
    put(pool, stream, 1, 9)
    child = os.fork()
    if child == 0:
        # What every method says there is test_forks.py's.
        del pool
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stream.synchronize()
    assert whole(pool) == {1: 9}
    with pytest.raises(gpu_ipc.Refused, match="is held by"):
        broker.adopt("kv")


EVERYTHING = f"""
import os, signal, numpy, gpu_ipc
broker = gpu_ipc.connect_broker(DIRECTORY, "host:0", timeout=600.0)
pool = broker.{CREATE}
closed = broker.{CREATE.replace("'kv',", "'other',", 1)}
closed.close()
stream = gpu_ipc.Stream("host:0")
pool.invalidate(1)
pool.seal(1, bytes(16), stream)
stream.synchronize()
"""


@pytest.mark.parametrize(
    "wait",
    [
        "broker.create_pool('third', {'a': ('uint8', (1,))}, 8192)",
        "broker.adopt('other')",
        "broker.read_pool('kv')",
        "pool.close()",
    ],
)
def test_ctrl_c_ends_every_wait(wait: str, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "broker"
    directory.mkdir(mode=0o700)
    server = serve(directory)
    try:
        interrupted(f"{EVERYTHING.replace('DIRECTORY', repr(str(directory)))}\nstop({server.pid})", wait, "pass")
    finally:
        server.kill()
        server.wait()


ENDS = ends(
    "broker, pool, reader, array, seen, stream",
    "assert pool.generation == 1 and len(reader.sealed()) == 1",
    "pool.sealed(); numpy.from_dlpack(reader['kv']); pool.invalidate(3)",
)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_interpreter_ends_quietly(end: str, directory: pathlib.Path) -> None:
    program = f"""
{EVERYTHING.replace('DIRECTORY', repr(str(directory)))}
reader = broker.read_pool("kv")
array = numpy.from_dlpack(pool["kv"])
array[1] = 4
seen = memoryview(reader["kv"])
{end}
"""
    assert said(program) == (0, "", "")
    with gpu_ipc.connect_broker(directory, DEVICE) as broker:
        pool = adopted(broker)
        assert pool.sealed()[0].block == 1 and (numpy.from_dlpack(pool["kv"])[1] == 4).all()


def test_a_hold_outlives_its_broker(broker: gpu_ipc.Broker, directory: pathlib.Path) -> None:
    pool = create(broker)
    reader = broker.read_pool("kv")
    numpy.from_dlpack(pool["kv"])[0] = 1
    broker.close()
    assert (numpy.from_dlpack(reader["kv"])[0] == 1).all()
    pool.close()
    with gpu_ipc.connect_broker(directory, DEVICE) as other:
        assert adopted(other).previous == "closed"


class Segments:
    """PyTorch's part: it finds two functions by name, and knows the device and the stream."""

    def __init__(self, stream: gpu_ipc.Stream) -> None:
        from gpu_ipc import _gpu_ipc

        library = ctypes.CDLL(str(_gpu_ipc.__file__))
        self._alloc, self._free = library.gpu_ipc_torch_pool_alloc, library.gpu_ipc_torch_pool_free
        self._alloc.restype, self._free.restype = ctypes.c_void_p, None
        self._alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._stream = stream

    def alloc(self, size: int, device: int = 0) -> int | None:
        found = self._alloc(size, device, self._stream.handle)
        assert found is None or isinstance(found, int)
        return found

    def free(self, start: int | None) -> None:
        self._free(start, 0, 0, self._stream.handle)


def test_segments_of_pytorch_lie_in_a_part_where_the_last_holder_had_them(
    broker: gpu_ipc.Broker, stream: gpu_ipc.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    from gpu_ipc._gpu_ipc import _take_segments

    segments, size = Segments(stream), 1 << 16
    pool = broker.create_pool("kv", {"kv": ("uint8", (size,)), "state": ("uint8", (5,))}, 8192)
    with pytest.raises(gpu_ipc.Unsupported, match="kv is on a host device"):
        pool.torch_pool("kv")
    for part, text in ((None, "of a pool of 2 parts"), ("no", "no, which kv does not have")):
        with pytest.raises(gpu_ipc.Invalid, match=text):
            _take_segments(pool, part)
    _take_segments(pool, "kv")
    _take_segments(pool, "kv")
    with pytest.raises(gpu_ipc.Invalid, match="one pool and part for each device"):
        _take_segments(pool, "state")
    other = create(broker, "other")
    with pytest.raises(gpu_ipc.Invalid, match="one pool and part for each device"):
        _take_segments(other, "kv")
    other.close()

    def allocated(pool: gpu_ipc.Pool) -> list[int]:
        at = pool["kv"].data_ptr
        found = [segments.alloc(size // 4) for _ in range(3)]
        segments.free(found[1])
        found += [segments.alloc(size // 8), segments.alloc(3 * size // 8), segments.alloc(size // 4)]
        assert None not in found[:4] and found[4] is None and found[5] is not None
        return [start - at for start in found if start is not None]

    places = allocated(pool)
    assert places == [0, size // 4, size // 2, size // 4, 3 * size // 4]
    until(lambda: f"no gap of {3 * size // 8} bytes in kv of kv" in caplog.text, "the refusal is logged")
    assert segments.alloc(0) is None and segments.alloc(-1) is None and segments.alloc(1, device=7) is None
    segments.free(None)
    base = pool["kv"].data_ptr
    ctypes.memset(base + places[2], 77, size // 4)
    # The segments keep the hold, and so their addresses.
    with pytest.raises(gpu_ipc.Invalid, match="kept by 4 arrays, parts or tensors"):
        pool.close()
    for place in {*places}:
        segments.free(base + place)
    pool.close()
    assert segments.alloc(1) is None
    until(lambda: "the pool of device 0 was closed" in caplog.text, "the refusal is logged")

    pool = broker.adopt("kv")
    _take_segments(pool, "kv")
    assert allocated(pool) == places
    assert ctypes.string_at(pool["kv"].data_ptr + places[2], size // 4) == bytes([77]) * (size // 4)


def test_seals_are_timed_beside_raw_words(broker: gpu_ipc.Broker, stream: gpu_ipc.Stream) -> None:
    from gpu_ipc._gpu_ipc import _time_seals

    pool = create(broker)
    seals, raw = _time_seals(pool, stream, BLOCKS, 5)
    assert len(seals) == len(raw) == 5 and min(seals + raw) > 0
    assert [(of.block, of.generation) for of in pool.sealed()] == [(block, 5) for block in range(BLOCKS)]


def test_a_pool_of_pytorchs_is_made_of_functions_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this library tells PyTorch, without PyTorch."""
    from gpu_ipc import _torch

    made: list[tuple[str, str, str]] = []

    class Allocator:
        def __init__(self, path: str, alloc: str, free: str) -> None:
            made.append((path, alloc, free))

        def allocator(self) -> "Allocator":
            return self

    memory, device = types.SimpleNamespace(CUDAPluggableAllocator=Allocator), contextlib.nullcontext
    cuda = types.SimpleNamespace(memory=memory, device=device, MemPool=lambda allocator: ["a pool", allocator])
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_torch, "_allocators", {})
    pools = [_torch.pool(0, f"gpu_ipc_torch{of}_alloc", f"gpu_ipc_torch{of}_free") for of in ("", "_pool", "_pool")]
    assert len(made) == 2 and pools[1] is not pools[2] and pools[1][1] is pools[2][1] is not pools[0][1]
    for path, *names in made:
        assert all(hasattr(ctypes.CDLL(path), name) for name in names)


def test_tensors_of_a_pool_are_its_memory(broker: gpu_ipc.Broker) -> None:
    torch = pytest.importorskip("torch")
    pool = create(broker)
    tensors = pool.tensors()
    tensors["kv"][3] = 7
    assert tensors["kv"].data_ptr() == pool["kv"].data_ptr and torch.equal(broker.read_pool("kv").tensors()["kv"][3], tensors["kv"][3])
    with pytest.raises(gpu_ipc.Invalid, match="kept by"):
        pool.close()
    del tensors
    pool.close()
