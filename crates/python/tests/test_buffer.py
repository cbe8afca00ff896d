"""The buffer protocol by numpy's rules: what is given for which flags, and what is refused."""

import ctypes
import itertools
from collections.abc import Iterator

import numpy
import pytest

import gpu_ipc
from conftest import DEVICE

pytestmark = pytest.mark.skipif(not DEVICE.startswith("host"), reason="the buffer protocol is for host memory")

WRITABLE, FORMAT, ND = 0x1, 0x4, 0x8
STRIDES = 0x10 | ND
C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS = 0x20 | STRIDES, 0x40 | STRIDES, 0x80 | STRIDES
ORDERS = {
    "SIMPLE": 0,
    "ND": ND,
    "STRIDES": STRIDES,
    "C_CONTIGUOUS": C_CONTIGUOUS,
    "F_CONTIGUOUS": F_CONTIGUOUS,
    "ANY_CONTIGUOUS": ANY_CONTIGUOUS,
    "INDIRECT": 0x100 | STRIDES,
}
EXTRAS = {"": 0, "+FORMAT": FORMAT, "+WRITABLE": WRITABLE, "+both": FORMAT | WRITABLE}
FLAGS = {order + extra: ORDERS[order] | EXTRAS[extra] for order, extra in itertools.product(ORDERS, EXTRAS)}


class Buffer(ctypes.Structure):
    """Python's `Py_buffer`."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


GET = ctypes.pythonapi.PyObject_GetBuffer
GET.argtypes = [ctypes.py_object, ctypes.POINTER(Buffer), ctypes.c_int]
RELEASE = ctypes.pythonapi.PyBuffer_Release
RELEASE.argtypes = [ctypes.POINTER(Buffer)]
RELEASE.restype = None


def answer(array: object, flags: int) -> object:
    """Say what an array gives for these flags, but for where it lies; or that it refuses."""
    view = Buffer()
    try:
        GET(array, ctypes.byref(view), flags)
    except (BufferError, ValueError):  # The second is how numpy refuses.
        return "refused"
    given = {
        name: [numbers[axis] for axis in range(view.ndim)] if numbers else None
        for name, numbers in (("shape", view.shape), ("strides", view.strides))
    }
    if 0 in (given["shape"] or []):
        # Nothing lies there: numpy's versions differ in what they say of it.
        given["strides"] = given["strides"] and []
    given |= {name: getattr(view, name) for name in ("len", "itemsize", "readonly", "ndim")}
    # numpy says `l` where this library says `q`.
    given["format"] = view.format and numpy.dtype(view.format.decode()).str
    RELEASE(ctypes.byref(view))
    return given


def kinds(plain: numpy.ndarray) -> Iterator[tuple[str, numpy.ndarray]]:
    """Arrays of each kind in one piece of memory of 120 numbers."""
    yield "contiguous", plain
    yield "part", plain[7:20]
    yield "strided", plain[::2]
    yield "negative", plain[::-1]
    yield "matrix", plain.reshape(10, 12)
    yield "fortran", plain.reshape(10, 12).T
    yield "columns", plain.reshape(10, 12)[:, 2:5]
    yield "rows", plain.reshape(10, 12)[2:5]
    yield "every other row", plain.reshape(10, 12)[::2]
    yield "cube", plain.reshape(4, 5, 6)
    yield "fortran cube", plain.reshape(4, 5, 6).transpose(2, 1, 0)
    yield "mixed cube", plain.reshape(4, 5, 6).transpose(1, 0, 2)
    yield "one row", plain.reshape(10, 12)[3:4]
    yield "one column", plain.reshape(10, 12)[:, 3:4]
    yield "one", plain[5:6]
    yield "repeated", numpy.broadcast_to(plain[:1], (3,))
    yield "0-d", plain[5:6].reshape(())
    yield "empty", plain[:0]
    yield "empty matrix", plain.reshape(10, 12)[:, :0]


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
def test_what_is_given_is_what_numpy_gives(session: gpu_ipc.Session, dtype: str, read_only: bool) -> None:
    # In a process of its own the mapping would be read-only; what is asked here is what is said of it.
    with gpu_ipc.connect(session.path, read_only=read_only) as participant:
        block = session.alloc(120 * numpy.dtype(dtype).itemsize)
        plain = numpy.asarray(block).view(dtype)
        plain[:] = numpy.arange(120)
        compared = 0
        for kind, array in kinds(plain):
            received = participant.claim(session.share(array))
            theirs = array.view()
            theirs.flags.writeable = array.flags.writeable and not read_only
            assert numpy.array_equal(numpy.asarray(received), theirs), kind
            for name, flags in FLAGS.items():
                assert answer(received, flags) == answer(theirs, flags), (kind, name)
                compared += 1
        assert compared == 19 * len(FLAGS)


def test_who_asks_for_contiguous_bytes_reads_no_gaps(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    """As pyarrow and the standard library do: each element and nothing else, or an error."""
    plain = numpy.asarray(session.alloc(64))
    plain[:] = numpy.arange(64)
    for array in (plain[::2], plain[::-1], plain.reshape(8, 8)[:, 1:3]):
        received = participant.claim(session.share(array))
        for flags in (C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS, ND, 0):
            assert answer(received, flags) == "refused"
        assert memoryview(received).tobytes() == array.tobytes()
    fortran = participant.claim(session.share(plain.reshape(8, 8).T))
    assert answer(fortran, F_CONTIGUOUS) != "refused" and answer(fortran, C_CONTIGUOUS) == "refused"
