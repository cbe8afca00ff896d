"""PyTorch: its tensors in and out, on the host and, where there is one, on a GPU."""

import gc
import sys

import pytest
from conftest import DEVICE, settled, until

import gpu_ipc

torch = pytest.importorskip("torch")


def born(session: gpu_ipc.Session, count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """Make a tensor that can be shared without a copy."""
    if session.device.kind == "host":
        return torch.from_dlpack(session.alloc(count * dtype.itemsize)).view(dtype)
    return torch.empty(count, dtype=dtype, device=f"cuda:{session.device.ordinal}")


@pytest.mark.parametrize("way", ["torch", "from_dlpack"])
@pytest.mark.parametrize("name", "bool uint8 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2".split())
def test_a_tensor_arrives_as_it_is(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, name: str, way: str
) -> None:
    if session.device.kind != "host":
        pytest.skip("a process cannot open its own memory on a GPU: gpu/check.py does this there")
    tensor = born(session, 24, getattr(torch, name))
    tensor.view(torch.uint8)[:] = torch.arange(tensor.nbytes, dtype=torch.uint8) % 2
    for view in (tensor, tensor.reshape(2, 3, 4)[:, 1:, ::2], tensor.reshape(4, 6).t()):
        received = participant.claim(session.share(view, to=participant.id))
        assert received.dtype == name
        got = received.torch() if way == "torch" else torch.from_dlpack(received)
        assert (got.dtype, got.shape, got.stride()) == (view.dtype, view.shape, view.stride())
        assert torch.equal(got.contiguous().view(torch.uint8), view.contiguous().view(torch.uint8))


def test_the_storage_is_kept_and_not_only_the_tensor(session: gpu_ipc.Session) -> None:
    from gpu_ipc._gpu_ipc import _PlainMemory

    memory = _PlainMemory(1 << 21, DEVICE)
    tensor = torch.from_dlpack(memory)
    storage = tensor.untyped_storage()
    before = sys.getrefcount(memory), storage.data_ptr()
    descriptor = session.share(tensor, to=session.ticket(None))
    assert descriptor.nbytes == 1 << 21
    tensor.data = torch.empty(0, dtype=torch.uint8)
    del tensor
    gc.collect()
    assert storage.data_ptr() == before[1]
    until(lambda: settled(session), "an unlimited ticket ends with its block")


def test_a_tensor_with_a_pending_conjugation_is_refused(session: gpu_ipc.Session) -> None:
    tensor = born(session, 4, torch.complex64)
    with pytest.raises(gpu_ipc.Unsupported, match="resolve_conj"):
        session.share(tensor.conj())


def test_a_storage_that_is_resized_under_its_lease_is_reported(
    session: gpu_ipc.Session, caplog: pytest.LogCaptureFixture
) -> None:
    if session.device.kind == "host":
        pytest.skip("PyTorch's own host memory cannot be shared")
    tensor = torch.zeros(1 << 20, device=f"cuda:{session.device.ordinal}")
    descriptor = session.share(tensor)
    tensor.untyped_storage().resize_(0)
    until(lambda: session.resized_storages == 1, "the storage is looked at")
    assert "copy=True" in caplog.text and descriptor.is_ticket


def test_a_pool_makes_tensors_that_are_born_in_the_session(session: gpu_ipc.Session) -> None:
    if session.device.kind == "host":
        with pytest.raises(gpu_ipc.Unsupported, match="cuda"):
            session.torch_pool()
        return
    pool = session.torch_pool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.arange(1 << 20, device=f"cuda:{session.device.ordinal}")
    assert session.stats().live_bytes >= tensor.nbytes
    with pytest.raises(gpu_ipc.Invalid, match="one pool"), gpu_ipc.Session(DEVICE) as other:
        other.torch_pool()
    regions = session.stats().source.regions
    descriptor = session.share(tensor[16:])
    assert (descriptor.nbytes, session.stats().source.regions) == (tensor[16:].nbytes, regions)
    session.close()
    with torch.cuda.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 28, device=f"cuda:{session.device.ordinal}")
    assert tensor.sum().item() == sum(range(1 << 20))
