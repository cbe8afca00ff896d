"""vLLM's KV cache in a pool, where a killed worker's successor finds it: `docs/integrations/VLLM.md`.

`PoolMemory` goes before a connector of vLLM's, ``class Mine(PoolMemory, TheirConnector)``, and answers `get_mem_pool_context`. What the
worker allocates then lies in a pool of a broker, in the same order and so at the same places for each worker of that rank. Which blocks
are whole the connector says by `gpu_ipc_pool`: `invalidate` before a block is filled, `seal` behind the work that fills it.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import gpu_ipc

MIB = 1 << 20
# What PyTorch asks for: whole segments of 2 MiB, and one of 20 MiB for tensors of less than 10 MiB.
_SEGMENT, _SHARED = 2 * MIB, 20 * MIB
# Seconds to wait for the end of the hold before: the proof of a death takes one or less.
PATIENCE = 60.0


def bytes_for(sizes: Iterable[int]) -> int:
    """Return the bytes of a part in which PyTorch has room for tensors of these sizes, each in a segment of its own."""
    return sum(max(-(-size // _SEGMENT) * _SEGMENT, _SHARED) for size in sizes)


def held(broker: gpu_ipc.Broker, name: str, nbytes: int, blocks: int) -> gpu_ipc.Pool:
    """Hold the pool that the worker before left, or make it.

    Raises:
        Mismatch: it has other sizes, since the worker before had another model or configuration.
        Refused: another process still held it after `PATIENCE`; the text names it.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            pool = broker.adopt(name)
            break
        except gpu_ipc.NotFound:
            return broker.create_pool(name, {"kv": ("uint8", (nbytes,))}, gpu_ipc.journal_bytes(blocks))
        except gpu_ipc.Refused:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
    there = pool["kv"].nbytes if pool.keys() == ["kv"] else 0
    if there != nbytes or pool.blocks < blocks:
        found = f"{there} bytes in `kv` and {pool.blocks} blocks"
        pool.close()
        raise gpu_ipc.Mismatch(
            f"the pool {name} has {found}, and this worker needs {nbytes} and {blocks}: remove it (`gpu-ipc rm {name}`), or start the"
            " worker with the model and the settings that it was made for"
        )
    return pool


class PoolMemory:
    """Has the worker of a KV connector allocate its cache in a pool, `gpu_ipc_pool`.

    Of `kv_connector_extra_config` it reads ``gpu_ipc_pool``, the name, to which the rank is added (``vllm-kv`` unless said);
    ``gpu_ipc_dir``, the broker's directory; and ``gpu_ipc_device``, PyTorch's current one unless said.
    """

    gpu_ipc_pool: gpu_ipc.Pool | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._gpu_ipc_configs = vllm_config, kv_cache_config

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        """Hold the pool, and return the context in which PyTorch allocates there."""
        vllm_config, kv_cache_config = self._gpu_ipc_configs
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        name = f"{extra.get('gpu_ipc_pool', 'vllm-kv')}-{vllm_config.parallel_config.rank}"
        nbytes = bytes_for(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        broker = gpu_ipc.connect_broker(extra.get("gpu_ipc_dir"), extra.get("gpu_ipc_device") or _current(), name=name)
        self.gpu_ipc_pool = held(broker, name, nbytes, kv_cache_config.num_blocks)
        return _context(self.gpu_ipc_pool)

    def shutdown(self) -> None:
        """Let go of the pool; the hold ends when the tensors in it are gone, or with this process."""
        super().shutdown()  # type: ignore[misc]
        self.gpu_ipc_pool = None


def _current() -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _context(pool: gpu_ipc.Pool) -> AbstractContextManager[Any]:
    import torch

    context: AbstractContextManager[Any] = torch.cuda.use_mem_pool(pool.torch_pool("kv"))
    return context
