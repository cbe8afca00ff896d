"""vLLM's KV cache in a pool, with connectors that are made as vLLM makes them: no vLLM, no PyTorch, no GPU."""

import contextlib
import pathlib
import sys
import types
from typing import Any

import numpy
import pytest
from conftest import DEVICE

import gpu_ipc
from gpu_ipc.integrations import vllm_kv

MIB = vllm_kv.MIB


class Base:
    """What a connector inherits from vLLM."""

    ended = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.role = role

    def get_mem_pool_context(self) -> None:
        return None

    def shutdown(self) -> None:
        self.ended = True


class Connector(vllm_kv.PoolMemory, Base):  # type: ignore[misc]
    pass


def connector(directory: pathlib.Path, sizes: list[int], num_blocks: int = 200, **extra: Any) -> Connector:
    extra = {"gpu_ipc_dir": str(directory), "gpu_ipc_device": DEVICE, **extra}
    config = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=types.SimpleNamespace(rank=3),
    )
    tensors = [types.SimpleNamespace(size=size) for size in sizes]
    return Connector(config, "worker", types.SimpleNamespace(num_blocks=num_blocks, kv_cache_tensors=tensors))


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[gpu_ipc.Pool]:
    """In place of PyTorch's context: the pools that it was entered for."""
    pools: list[gpu_ipc.Pool] = []

    def context(pool: gpu_ipc.Pool) -> Any:
        pools.append(pool)
        return contextlib.nullcontext()

    monkeypatch.setattr(vllm_kv, "_context", context)
    return pools


def test_room_is_for_whole_segments() -> None:
    assert vllm_kv.bytes_for([]) == 0
    assert vllm_kv.bytes_for([1, 9 * MIB, 20 * MIB]) == 60 * MIB
    assert vllm_kv.bytes_for([20 * MIB + 1, 40 * MIB]) == 62 * MIB


def test_a_worker_has_the_cache_of_the_one_before(
    broker: gpu_ipc.Broker, directory: pathlib.Path, entered: list[gpu_ipc.Pool]
) -> None:
    first = connector(directory, [MIB, 21 * MIB])
    assert first.role == "worker" and first.gpu_ipc_pool is None
    with first.get_mem_pool_context():
        pool = first.gpu_ipc_pool
    assert pool is not None and entered == [pool] and pool.name == "vllm-kv-3"
    assert pool["kv"].nbytes == 42 * MIB and pool.blocks >= 200 and pool.previous == "never"
    stream = gpu_ipc.Stream(DEVICE)
    pool.invalidate(7)
    numpy.from_dlpack(pool["kv"])[7] = 9
    pool.seal(7, bytes(range(16)), stream)
    stream.synchronize()
    # What vLLM does at its end: nothing else of the pool is left.
    first.shutdown()
    assert first.ended and first.gpu_ipc_pool is None
    entered.clear()
    del pool
    second = connector(directory, [MIB, 21 * MIB])
    second.get_mem_pool_context()
    pool = second.gpu_ipc_pool
    assert pool is not None and pool.previous == "closed"
    assert [of.key for of in pool.sealed()] == [bytes(range(16))] and numpy.from_dlpack(pool["kv"])[7] == 9


def test_a_worker_of_another_size_is_refused_with_both(
    broker: gpu_ipc.Broker, directory: pathlib.Path, entered: list[gpu_ipc.Pool]
) -> None:
    first = connector(directory, [MIB], gpu_ipc_pool="cache")
    first.get_mem_pool_context()
    first.shutdown()
    entered.clear()
    for sizes, blocks in (([MIB, MIB], 200), ([MIB], 5000)):
        other = connector(directory, sizes, blocks, gpu_ipc_pool="cache")
        with pytest.raises(gpu_ipc.Mismatch, match=rf"cache-3 has {20 * MIB} bytes .* needs \d+ and {blocks}: remove it"):
            other.get_mem_pool_context()
        assert other.gpu_ipc_pool is None and entered == []
    again = connector(directory, [MIB], gpu_ipc_pool="cache")
    again.get_mem_pool_context()
    assert len(entered) == 1


def test_a_worker_that_is_still_there_is_named(
    broker: gpu_ipc.Broker, directory: pathlib.Path, entered: list[gpu_ipc.Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_kv, "PATIENCE", 0.05)
    first = connector(directory, [MIB])
    first.get_mem_pool_context()
    with pytest.raises(gpu_ipc.Refused, match="vllm-kv-3 is held by process"):
        connector(directory, [MIB]).get_mem_pool_context()


def test_the_context_is_pytorchs_over_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(use_mem_pool=lambda of: ("in", of), current_device=lambda: 5)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    pool: Any = types.SimpleNamespace(torch_pool=lambda part: f"the memory of {part}")
    entered: Any = vllm_kv._context(pool)
    assert entered == ("in", "the memory of kv")
    assert vllm_kv._current() == "cuda:5"
