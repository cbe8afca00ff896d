// A session in an epoll loop, without exceptions: c++ -std=c++17 -fno-exceptions events.cpp $(pkg-config --cflags --libs gpu_ipc)
//
//     ./events SOCKET
//
// The session's descriptor is readable while there is a notice: a participant joined or left. The loop waits for it beside any
// other descriptor. Here a child joins, is sent a block through a pipe, reads it and leaves.

#include <gpu_ipc.hpp>

#include <cstdio>
#include <cstring>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using gpu_ipc::attempt;
using gpu_ipc::make;

constexpr char text[] = "seven";

int failed(const gpu_ipc::Error &error) {
    std::fprintf(stderr, "%s; %s\n", error.what(), error.remedy());
    return 1;
}

// The child: connects, claims what it is sent, and reads it.
int consume(const char *path, int from) {
    auto device = make<gpu_ipc::Device>(gpu_ipc_device_open, static_cast<uint32_t>(GPU_IPC_HOST), 0u);
    if (!device) {
        return failed(device.error());
    }
    auto options = gpu_ipc::sized<gpu_ipc_connect_options>();
    options.wait_for_producer_ns = 60'000'000'000;
    auto participant = make<gpu_ipc::Participant>(gpu_ipc_connect, device->get(), path, &options);
    if (!participant) {
        return failed(participant.error());
    }
    gpu_ipc::Descriptor descriptor;
    if (read(from, &descriptor, sizeof descriptor) != static_cast<ssize_t>(sizeof descriptor)) {
        std::fprintf(stderr, "no descriptor came\n");
        return 1;
    }
    const uint32_t wait = GPU_IPC_WAIT;
    auto received = make<gpu_ipc::Received>(gpu_ipc_claim, participant->get(), descriptor.bytes, sizeof descriptor.bytes, wait, nullptr, -1);
    if (!received) {
        return failed(received.error());
    }
    return std::memcmp(gpu_ipc_received_ptr(received->get()), text, sizeof text) == 0 ? 0 : 1;
}

// What a new participant is sent.
int serve(const gpu_ipc::Block &block, uint64_t participant, int to) {
    auto descriptor = make<gpu_ipc::Descriptor>(gpu_ipc_share, block.get(), participant, nullptr, nullptr);
    if (!descriptor) {
        return failed(descriptor.error());
    }
    return write(to, &*descriptor, sizeof *descriptor) == static_cast<ssize_t>(sizeof *descriptor) ? 0 : 1;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: events SOCKET\n");
        return 2;
    }
    int ends[2];
    if (pipe(ends) != 0) {
        return 1;
    }
    // Before the library has threads.
    const pid_t child = fork();
    if (child == 0) {
        close(ends[1]);
        _exit(consume(argv[1], ends[0]));
    }
    close(ends[0]);
    auto device = make<gpu_ipc::Device>(gpu_ipc_device_open, static_cast<uint32_t>(GPU_IPC_HOST), 0u);
    if (!device) {
        return failed(device.error());
    }
    auto options = gpu_ipc::sized<gpu_ipc_session_options>();
    options.socket = argv[1];
    auto session = make<gpu_ipc::Session>(gpu_ipc_session_open, device->get(), &options);
    if (!session) {
        return failed(session.error());
    }
    auto block = make<gpu_ipc::Block>(gpu_ipc_alloc, session->get(), uint64_t{4096}, int64_t{0});
    if (!block) {
        return failed(block.error());
    }
    std::memcpy(gpu_ipc_block_ptr(block->get()), text, sizeof text);

    const int loop = epoll_create1(EPOLL_CLOEXEC);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = gpu_ipc_session_fd(session->get());
    if (loop < 0 || event.data.fd < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, event.data.fd, &event) != 0) {
        return 1;
    }
    for (bool left = false; !left;) {
        if (epoll_wait(loop, &event, 1, 60000) != 1) {
            std::fprintf(stderr, "nothing came in a minute\n");
            return 1;
        }
        // Until there is none: the loop may tell of changes only.
        for (;;) {
            gpu_ipc_notice notice{};
            if (auto read = attempt(gpu_ipc_session_next_notice, session->get(), &notice); !read) {
                return failed(read.error());
            }
            if (notice.kind == GPU_IPC_NOTICE_NONE) {
                break;
            }
            if (notice.kind == GPU_IPC_NOTICE_JOINED && serve(*block, notice.number, ends[1]) != 0) {
                return 1;
            }
            left = left || notice.kind == GPU_IPC_NOTICE_LEFT;
        }
    }
    close(loop);
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) {
        std::fprintf(stderr, "the child did not read what was shared\n");
        return 1;
    }
    std::printf("a participant joined, read a block, and left\n");
    return 0;
}
