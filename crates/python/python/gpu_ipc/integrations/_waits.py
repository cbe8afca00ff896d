"""Events of LMCache's workers that died: what a surviving process does so that streams that wait for them go on."""

from typing import Any

# Queues of a device: a stream that waits holds up those that share its queue, and each new stream takes the next.
_QUEUES = 8


def complete(device: Any, events: list[Any]) -> None:
    """Complete events of a dead process, words (``--isolated-ipc``) or CUDA's: a word is written, an event recorded again."""
    import torch

    if torch.device(device).type != "cuda":
        return
    from lmcache.v1.platform.devices.cuda.utils import _CHECK_CUDA, _cuda

    driver, runtime = _cuda.driver, _cuda.runtime
    words: dict[int, int] = {}
    for event in events:
        if hasattr(event, "base_ptr") and event.seq:
            word = event.base_ptr + event.slot_offset
            words[word] = max(event.seq, words.get(word, 0))
    with torch.cuda.device(device):
        for _ in range(_QUEUES):
            made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
            _CHECK_CUDA(made, "cudaStreamCreateWithFlags")
            stream = int(made[1])
            done = [driver.cuStreamWriteValue64(driver.CUstream(stream), word, value, 0) for word, value in words.items()]
            # PyTorch's `record` would keep the interpreter from other threads for as long as the driver makes it wait.
            done += [runtime.cudaEventRecord(event.cuda_event, stream) for event in events if not hasattr(event, "base_ptr")]
            # The stream ends once that is done.
            for result in (*done, runtime.cudaStreamDestroy(stream)):
                _CHECK_CUDA(result, "completing an event of a dead process")
