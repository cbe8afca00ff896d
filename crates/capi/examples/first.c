// Shares a block between a producer and a consumer, here in one process, and looks at what is left.
//
//     cc first.c $(pkg-config --cflags --libs gpu_ipc) && ./a.out

#include "common.h"

int main(int argc, char **argv)
{
    gpu_ipc_session_options options = {.size = sizeof options, .socket = argc > 1 ? argv[1] : NULL};
    gpu_ipc_device *device;
    gpu_ipc_stream *stream;
    gpu_ipc_session *session;
    gpu_ipc_participant *consumer;
    char path[4096];
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device"); // or GPU_IPC_CUDA, GPU_IPC_HIP
    check(gpu_ipc_stream_create(device, &stream), "stream");
    check(gpu_ipc_session_open(device, &options, &session), "session");
    check(gpu_ipc_session_path(session, path, sizeof path), "path");
    // Usually another process, which was told the path.
    check(gpu_ipc_connect(device, path, NULL, &consumer), "connect");

    gpu_ipc_block *block;
    gpu_ipc_descriptor descriptor;
    check(gpu_ipc_alloc(session, 1 << 20, 0, &block), "alloc");
    check(gpu_ipc_block_write(block, 0, "seven", 5, stream), "write"); // or a kernel writes to gpu_ipc_block_ptr(block)
    check(gpu_ipc_share(block, gpu_ipc_participant_id(consumer), stream, NULL, &descriptor), "share");
    check(gpu_ipc_block_close(block), "close"); // never blocks: the lease outlives the handle

    // descriptor.bytes travel by any transport.
    gpu_ipc_received *received;
    char bytes[5];
    check(gpu_ipc_claim(consumer, descriptor.bytes, sizeof descriptor.bytes, GPU_IPC_WAIT, stream, -1, &received), "claim");
    check(gpu_ipc_received_read(received, 0, bytes, sizeof bytes, stream), "read");
    printf("%llu bytes that begin with %.5s\n", (unsigned long long)gpu_ipc_received_len(received), bytes);
    check(gpu_ipc_received_close(received), "close"); // the memory is the producer's again

    check(gpu_ipc_participant_leave(consumer, -1), "leave");
    check(gpu_ipc_session_shutdown(session, -1), "shutdown");
    check(gpu_ipc_session_close(session), "close");
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_device_close(device), "close");
    return memcmp(bytes, "seven", 5) == 0 ? 0 : 1;
}
