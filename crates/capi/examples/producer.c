// Shares numbered blocks with who connects, and prints a descriptor a line on standard output.
//
//     ./producer /tmp/numbers 5 | (until [ -S /tmp/numbers ]; do sleep 0.1; done; ./consumer /tmp/numbers)
//
// Takes a path for its socket, a number of blocks, and perhaps a vendor: host, cuda or hip. The same lines as those of
// examples/producer.rs, so that either consumer reads them.

#include "common.h"

int main(int argc, char **argv)
{
    require(argc == 3 || argc == 4, "usage: producer SOCKET COUNT [host|cuda|hip]");
    gpu_ipc_device *device;
    gpu_ipc_stream *stream;
    gpu_ipc_session *session;
    check(gpu_ipc_device_open(vendor(argc == 4 ? argv[3] : "host"), 0, &device), "device");
    check(gpu_ipc_stream_create(device, &stream), "stream");
    gpu_ipc_session_options options = {.size = sizeof options, .socket = argv[1]};
    check(gpu_ipc_session_open(device, &options, &session), "session");
    uint64_t consumer;
    size_t count;
    check(gpu_ipc_session_participants(session, 1, INT64_C(60000000000), &consumer, 1, &count), "wait");
    uint64_t blocks = strtoull(argv[2], NULL, 10);
    for (uint64_t number = 0; number < blocks; ++number) {
        gpu_ipc_block *block;
        gpu_ipc_descriptor descriptor;
        check(gpu_ipc_alloc(session, 1 << 16, 0, &block), "alloc");
        check(gpu_ipc_block_write(block, 0, &number, sizeof number, stream), "write");
        check(gpu_ipc_share(block, consumer, stream, NULL, &descriptor), "share");
        for (size_t at = 0; at < sizeof descriptor.bytes; ++at) {
            printf("%02x", descriptor.bytes[at]);
        }
        printf("\n");
        fflush(stdout);
        // Closed here, while the consumer may still hold it: it waits in limbo.
        check(gpu_ipc_block_close(block), "close");
    }
    check(gpu_ipc_session_shutdown(session, INT64_C(60000000000)), "shutdown");
    check(gpu_ipc_session_close(session), "close");
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_device_close(device), "close");
    return 0;
}
