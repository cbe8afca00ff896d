// Claims what a producer shares: a descriptor a line on standard input, as producer.c and examples/producer.rs print them.
//
// Takes the path of the producer's socket, and perhaps a vendor: host, cuda or hip.

#include "common.h"

int main(int argc, char **argv)
{
    require(argc == 2 || argc == 3, "usage: consumer SOCKET [host|cuda|hip]");
    gpu_ipc_device *device;
    gpu_ipc_stream *stream;
    gpu_ipc_participant *producer;
    check(gpu_ipc_device_open(vendor(argc == 3 ? argv[2] : "host"), 0, &device), "device");
    check(gpu_ipc_stream_create(device, &stream), "stream");
    check(gpu_ipc_connect(device, argv[1], NULL, &producer), "connect");
    char line[2 * GPU_IPC_DESCRIPTOR_BYTES + 2];
    while (fgets(line, sizeof line, stdin)) {
        gpu_ipc_descriptor descriptor;
        for (size_t at = 0; at < sizeof descriptor.bytes; ++at) {
            unsigned byte;
            require(sscanf(line + 2 * at, "%2x", &byte) == 1, "a line is no descriptor in hexadecimal");
            descriptor.bytes[at] = (uint8_t)byte;
        }
        gpu_ipc_received *block;
        uint64_t number;
        check(gpu_ipc_claim(producer, descriptor.bytes, sizeof descriptor.bytes, GPU_IPC_WAIT, stream,
                            INT64_C(60000000000), &block),
              "claim");
        check(gpu_ipc_received_read(block, 0, &number, sizeof number, stream), "read");
        printf("%llu\n", (unsigned long long)number);
        check(gpu_ipc_received_close(block), "close");
    }
    check(gpu_ipc_participant_leave(producer, -1), "leave");
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_device_close(device), "close");
    return 0;
}
