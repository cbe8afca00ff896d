"""JAX: what it reads and shares, on its CPU device and on a GPU's."""

import numpy
import pytest
from conftest import settled, until

import gpu_ipc

jax = pytest.importorskip("jax")


def test_jax_reads_what_was_claimed(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    if session.device.kind != "host":
        pytest.skip("a process cannot open its own memory on a GPU: gpu/check.py does this there")
    array = numpy.from_dlpack(session.alloc(4096)).view(numpy.float32).reshape(4, 256)
    array[:] = numpy.arange(1024).reshape(4, 256)
    made = jax.dlpack.from_dlpack(participant.claim(session.share(array, to=participant.id)))
    assert made.shape == (4, 256) and float(made.sum()) == float(array.sum())
    del made, array
    until(lambda: settled(session), "the array alone keeps the lease")


def test_an_array_of_jax_is_shared_by_a_copy(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    if session.device.kind != "host":
        pytest.skip("a process cannot open its own memory on a GPU: gpu/check.py does this there")
    array = jax.numpy.arange(12, dtype=jax.numpy.bfloat16).reshape(3, 4)
    with pytest.raises(gpu_ipc.Unsupported, match="copy=True"):
        session.share(array, to=participant.id)
    received = participant.claim(session.share(array, to=participant.id, copy=True))
    assert (received.dtype, received.shape) == ("bfloat16", (3, 4))
    assert (jax.dlpack.from_dlpack(received) == array).all()
