// A ring of frames: a camera writes into a few blocks again and again, and a viewer in another process looks at every frame.
//
//     ./ring SOCKET [FRAMES] [host|cuda|hip]
//
// A frame is written again when its viewer has closed it. Nothing is allocated after the start, and nothing is copied.

#include <gpu_ipc.hpp>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr size_t width = 640, height = 480, blocks = 4;

gpu_ipc::Backend vendor(const std::string &name) {
    return name == "cuda" ? gpu_ipc::Backend::cuda : name == "hip" ? gpu_ipc::Backend::hip : gpu_ipc::Backend::host;
}

// What travels with each frame, in the bytes of the user's own.
struct Header {
    uint32_t number;
    uint32_t width;
    uint32_t height;
};

void view(const std::string &path, gpu_ipc::Backend backend, int from) {
    auto device = gpu_ipc::Device::open(backend);
    auto stream = gpu_ipc::Stream::create(device);
    auto camera = gpu_ipc::Participant::connect(device, path);
    uint32_t next = 0;
    gpu_ipc::Descriptor descriptor;
    while (read(from, &descriptor, sizeof descriptor) == static_cast<ssize_t>(sizeof descriptor)) {
        auto info = gpu_ipc::sized<gpu_ipc_descriptor_info>();
        gpu_ipc::check(gpu_ipc_descriptor_get_info(descriptor.bytes, sizeof descriptor.bytes, &info));
        Header header;
        std::memcpy(&header, info.user, sizeof header);
        auto frame = camera.claim(descriptor, stream);
        uint32_t first = 0, last = 0;
        frame.read(&first, sizeof first, stream);
        frame.read(&last, sizeof last, stream, frame.size() - sizeof last);
        if (header.number != next || first != next || last != next || frame.size() != width * height) {
            throw std::runtime_error("frame " + std::to_string(next) + " is another one, or torn");
        }
        ++next;
    }
    camera.leave();
}

void film(const gpu_ipc::Device &device, const gpu_ipc::Session &session, int to, uint32_t frames) {
    auto stream = gpu_ipc::Stream::create(device);
    uint64_t viewer = session.participants(1, std::chrono::seconds(60)).at(0);
    std::vector<gpu_ipc::Block> ring;
    for (size_t at = 0; at < blocks; ++at) {
        ring.push_back(session.alloc(width * height));
    }
    std::vector<char> picture(width * height);
    uint32_t waits = 0;
    for (uint32_t number = 0; number < frames; ++number) {
        const auto &block = ring[number % blocks];
        if (!block.wait_released(gpu_ipc::no_wait)) {
            ++waits;
            block.wait_released();
        }
        std::memcpy(picture.data(), &number, sizeof number);
        std::memcpy(picture.data() + picture.size() - sizeof number, &number, sizeof number);
        block.write(picture.data(), picture.size(), stream);
        Header header{number, width, height};
        gpu_ipc::ShareOptions options;
        options.user = {reinterpret_cast<const char *>(&header), sizeof header};
        auto descriptor = block.share(gpu_ipc::To::one(viewer), stream, options);
        if (write(to, &descriptor, sizeof descriptor) != static_cast<ssize_t>(sizeof descriptor)) {
            throw std::runtime_error("the viewer is gone");
        }
    }
    std::printf("%u frames through %zu blocks, %u waits for the viewer\n", frames, blocks, waits);
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: ring SOCKET [FRAMES] [host|cuda|hip]\n");
        return 2;
    }
    std::string path = argv[1];
    auto frames = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 300);
    gpu_ipc::Backend backend = vendor(argc > 3 ? argv[3] : "host");
    int descriptors[2], ready[2];
    if (pipe(descriptors) != 0 || pipe(ready) != 0) {
        return 1;
    }
    // Before the first call of the library: a device's driver does not work in a forked child.
    pid_t child = fork();
    try {
        if (child == 0) {
            close(descriptors[1]);
            close(ready[1]);
            char byte;
            // The camera listens.
            if (read(ready[0], &byte, 1) != 1) {
                return 1;
            }
            view(path, backend, descriptors[0]);
            return 0;
        }
        close(descriptors[0]);
        auto device = gpu_ipc::Device::open(backend);
        auto session = gpu_ipc::Session::open(device, path);
        if (write(ready[1], "r", 1) != 1) {
            return 1;
        }
        film(device, session, descriptors[1], frames);
        close(descriptors[1]);
        session.shutdown(std::chrono::seconds(60));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", child == 0 ? "viewer" : "camera", error.what());
        return 1;
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
}
