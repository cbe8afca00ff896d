"""DLPack's table of C functions: what is done where a library's is of another version, lacks functions, or fails."""

import subprocess
import sys

import pytest
from conftest import WATCHDOG

# Each case is a table in a process of its own, which stays as long as that does. Memory of the session lies behind it.
PROGRAM = """
import ctypes
import sys
import types

import numpy

import gpu_ipc

Reads = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
Makes = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
Deletes = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Table(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("object_from_managed", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


def capsule(table, name=b"dlpack_exchange_api"):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kept.append((table, name))
    return new(ctypes.addressof(table), name, None)


# The table and its name stay as long as the process.
kept = []
asked = []
lengths = (ctypes.c_int64 * 2)(2, 3)
# A function of Python's own that fails and sets an exception: the first argument is no capsule.
fails = ctypes.cast(ctypes.pythonapi.PyCapsule_SetContext, ctypes.c_void_p).value


@Reads
def read(array, tensor):
    asked.append("read")
    array = ctypes.cast(array, ctypes.py_object).value
    given = Tensor(array.block.data_ptr, (1, 0), 2, 2, 32, 1, ctypes.addressof(lengths), None, array.offset)
    ctypes.memmove(tensor, ctypes.addressof(given), ctypes.sizeof(Tensor))
    return 0


@Makes
def make(managed, out):
    asked.append("make")
    managed = Managed.from_address(managed)
    assert (tuple(managed.version)[0], managed.flags) == (1, 0)
    made = types.SimpleNamespace(data=managed.tensor.data)
    Deletes(managed.deleter)(ctypes.addressof(managed))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    out[0] = id(made)
    return 0


def pointer(function):
    return ctypes.cast(function, ctypes.c_void_p).value


good = Table(1, 3, None, None, None, pointer(make), pointer(read), None)
tables = {
    "good": good,
    "older behind": Table(2, 0, ctypes.addressof(good), None, None, 1, 1, 1),
    "of version 2": Table(2, 0, None, None, None, 1, 1, 1),
    "of version 0": Table(0, 8, None, None, None, 1, 1, 1),
    "no functions": Table(1, 3),
    "functions fail": Table(1, 3, None, None, None, fails, fails, None),
}
loop = Table(2, 0, None, None, None, 1, 1, 1)
loop.previous = ctypes.addressof(loop)
tables["that is behind itself"] = loop
what = sys.argv[1]


class Array:
    def __init__(self, block, offset=8):
        self.block, self.offset = block, offset

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **keywords):
        asked.append("__dlpack__")
        return numpy.from_dlpack(self.block).view(numpy.float32)[2:8].reshape(2, 3).__dlpack__(**keywords)


if what in tables:
    Array.__dlpack_c_exchange_api__ = capsule(tables[what])
elif what == "of another name":
    Array.__dlpack_c_exchange_api__ = capsule(good, b"dlpack_exchange")
elif what == "no capsule":
    Array.__dlpack_c_exchange_api__ = 17


# Whose tensors `received.torch()` makes.
def from_dlpack(taken):
    asked.append("from_dlpack")
    return taken


sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch.utils"] = types.ModuleType("torch.utils")
sys.modules["torch.utils.dlpack"] = types.ModuleType("torch.utils.dlpack")
sys.modules["torch"].Tensor = Array
sys.modules["torch.utils.dlpack"].from_dlpack = from_dlpack

with gpu_ipc.Session("host:0", sys.argv[2]) as session, gpu_ipc.connect(session.path) as participant:
    block = session.alloc(32)
    numpy.from_dlpack(block).view(numpy.float32)[:] = range(8)
    descriptor = session.share(Array(block), to=participant.id)
    assert (descriptor.dtype, descriptor.shape) == ("float32", (2, 3)), descriptor
    received = participant.claim(descriptor)
    assert numpy.from_dlpack(received).tolist() == [[2, 3, 4], [5, 6, 7]]
    assert received.data_ptr == block.data_ptr + 8
    try:
        made = received.torch()
        assert "made it" in sys.argv[3:] or type(made).__name__ == "PyCapsule", made
        del made
    except ValueError as error:
        assert "it failed" in sys.argv[3:], error
    del received
    # Several at once, one of which cannot be had in the end.
    asked, single = [], asked
    many = session.share_many([Array(block), block], to=participant.id)
    try:
        tensors = participant.claim_tensors(many)
        assert len(tensors) == 2 and "made it" in sys.argv[3:] or type(tensors[1]).__name__ == "PyCapsule", tensors
        del tensors
    except ValueError as error:
        assert "it failed" in sys.argv[3:], error
    again = session.share_many([block, block], to=participant.id)
    participant.claim(again[1])
    try:
        participant.claim_tensors(again)
        raise AssertionError("what was claimed is claimed again")
    except gpu_ipc.AlreadyClaimed:
        pass
    asked = single
    # Neither an exception nor a lease is left behind.
    while session.stats().held:
        session.collect()
    print(*asked, flush=True)
"""


@pytest.mark.parametrize(
    ("table", "asked", "made"),
    [
        ("none", "__dlpack__ from_dlpack", ""),
        ("good", "read make", "made it"),
        ("older behind", "read make", "made it"),
        ("of version 2", "__dlpack__ from_dlpack", ""),
        ("of version 0", "__dlpack__ from_dlpack", ""),
        ("that is behind itself", "__dlpack__ from_dlpack", ""),
        ("of another name", "__dlpack__ from_dlpack", ""),
        ("no capsule", "__dlpack__ from_dlpack", ""),
        ("no functions", "__dlpack__ from_dlpack", ""),
        ("functions fail", "__dlpack__", "it failed"),
    ],
)
def test_a_table_is_used_where_it_works(path: str, table: str, asked: str, made: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, table, path, made],
        capture_output=True,
        text=True,
        timeout=2 * WATCHDOG,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{asked}\n", "")
