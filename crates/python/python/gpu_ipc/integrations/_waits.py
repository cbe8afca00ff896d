"""Words of LMCache's workers that died: a surviving process writes them, so that streams that wait for them go on."""

from typing import Any

# Queues of a device: a stream that waits holds up those that share its queue, and each new stream takes the next.
_QUEUES = 8


def complete(device: Any, events: list[Any]) -> None:
    """Write the words of events (``--isolated-ipc``) of a dead process. Events of CUDA's are left: they cannot be completed.

    Recording such an event again, which CUDA allows in any process, ends no wait that was queued before (tried on an H100).
    """
    words: dict[int, int] = {}
    for event in events:
        if getattr(event, "base_ptr", 0) and event.seq:
            word = event.base_ptr + event.slot_offset
            words[word] = max(event.seq, words.get(word, 0))
    if not words:
        return
    import torch
    from lmcache.v1.platform.devices.cuda.utils import _CHECK_CUDA, _cuda

    driver, runtime = _cuda.driver, _cuda.runtime
    with torch.cuda.device(device):
        for _ in range(_QUEUES):
            made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
            _CHECK_CUDA(made, "cudaStreamCreateWithFlags")
            stream = int(made[1])
            done = [driver.cuStreamWriteValue64(driver.CUstream(stream), word, value, 0) for word, value in words.items()]
            # The stream ends once that is done.
            for result in (*done, runtime.cudaStreamDestroy(stream)):
                _CHECK_CUDA(result, "writing a word of a dead process")
