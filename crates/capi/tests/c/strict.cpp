// What the C++ forms refuse, and those that the examples leave out.
//
//     strict SOCKET

#include <gpu_ipc.hpp>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <type_traits>
#include <unistd.h>

using gpu_ipc::After;
using gpu_ipc::To;
using gpu_ipc::Wait;

namespace {

static_assert(std::is_nothrow_copy_constructible_v<gpu_ipc::Error>);
static_assert(!std::is_default_constructible_v<After> && !std::is_default_constructible_v<Wait>);

void require(bool holds, const std::string &what) {
    if (!holds) {
        throw std::runtime_error(what);
    }
}

// The call throws, with this code and a text that has the word.
template <class Call>
void refuses(int32_t code, const std::string &word, Call call) {
    try {
        call();
    } catch (const gpu_ipc::Error &error) {
        const gpu_ipc::Error copy = error;
        require(copy.code() == code && std::string(copy.what()).find(word) != std::string::npos,
                "another error: " + std::to_string(copy.code()) + ", " + copy.what());
        return;
    }
    throw std::runtime_error("no error that says \"" + word + "\"");
}

// After main: the thread's last error is still there, with its text.
struct AtTheEnd {
    bool armed = false;

    ~AtTheEnd() {
        if (armed && (gpu_ipc_session_shutdown(nullptr, 0) != GPU_IPC_BAD_HANDLE || gpu_ipc_last_error_text()[0] == 0)) {
            _exit(9);
        }
    }
} at_the_end;

// In a child, before the library is used: a destructor that throws in a callback ends the process by std::terminate.
void a_callback_that_throws() {
    pid_t child = fork();
    if (child == 0) {
        std::set_terminate([] { _exit(42); });
        auto device = gpu_ipc::Device::open(gpu_ipc::Backend::host);
        auto throws = [](int *) { throw 1; };
        auto stream = gpu_ipc::Stream::borrow(device, nullptr, std::shared_ptr<int>(new int, throws));
        stream.reset();
        // The callback's thread ends the process.
        for (;;) {
            pause();
        }
    }
    int status = 0;
    require(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 42,
            "a callback that throws ends the process by " + std::to_string(status));
}

void accessors_throw() {
    refuses(GPU_IPC_BAD_HANDLE, "a block is null", [] { gpu_ipc::Block().ptr(); });
    refuses(GPU_IPC_BAD_HANDLE, "a block is null", [] { gpu_ipc::Block().size(); });
    refuses(GPU_IPC_BAD_HANDLE, "a block is null", [] { gpu_ipc::Block().outstanding(); });
    refuses(GPU_IPC_BAD_HANDLE, "a session is null", [] { gpu_ipc::Session().fd(); });
    refuses(GPU_IPC_BAD_HANDLE, "a participant is null", [] { gpu_ipc::Participant().fd(); });
    refuses(GPU_IPC_BAD_HANDLE, "a participant is null", [] { gpu_ipc::Participant().id(); });
    refuses(GPU_IPC_BAD_HANDLE, "a received block is null", [] { gpu_ipc::Received().ptr(); });
    refuses(GPU_IPC_BAD_HANDLE, "a received block is null", [] { gpu_ipc::Received().size(); });
    refuses(GPU_IPC_BAD_HANDLE, "a received block is null", [] { gpu_ipc::Received().region(); });
}

void nothing_is_guessed(const gpu_ipc::Session &session, const gpu_ipc::Device &device,
                        const gpu_ipc::Participant &consumer) {
    auto block = session.alloc(4096);
    auto stream = gpu_ipc::Stream::create(device);
    auto moved = gpu_ipc::Stream::create(device);
    auto other = std::move(moved);
    refuses(GPU_IPC_PARTICIPANT_GONE, "gone", [&] { block.share(To::one(0), After::done()); });
    refuses(GPU_IPC_PARTICIPANT_GONE, "gone", [&] { block.share(To(), After::done()); });
    refuses(GPU_IPC_INVALID, "0 claims", [&] { session.share_many({{&block, To()}}, stream); });
    refuses(GPU_IPC_BAD_HANDLE, "share after", [&] { block.share(To::one(consumer.id()), moved); });
    refuses(GPU_IPC_BAD_HANDLE, "share after", [&] { session.share_many({{&block, To::ticket(1)}}, moved); });
    gpu_ipc::ShareOptions options;
    std::string user(65, 'u');
    options.user = user;
    refuses(GPU_IPC_INVALID, "65", [&] { block.share(To::ticket(1), stream, options); });
    options.user = std::string_view(user).substr(1);
    options.time_to_live = std::chrono::nanoseconds(0);
    refuses(GPU_IPC_INVALID, "time to live", [&] { block.share(To::ticket(1), stream, options); });
    options.time_to_live = gpu_ipc::forever;
    require(block.outstanding() == 0, "something was granted");

    auto descriptor = block.share(To::everybody(), stream, options);
    require(gpu_ipc::info_of(descriptor).user[63] == 'u', "other bytes of the user's");
    refuses(GPU_IPC_BAD_HANDLE, "wait on", [&] { consumer.claim(descriptor, moved); });
    refuses(GPU_IPC_BAD_HANDLE, "wait on", [&] { consumer.try_claim(descriptor, moved); });
    auto received = consumer.claim(descriptor);
    refuses(GPU_IPC_BAD_HANDLE, "wait on", [&] { received.wait(moved); });
    refuses(GPU_IPC_INVALID, "0 claims", [&] { received.forward(To()); });
    refuses(GPU_IPC_INVALID, "65 bytes", [&] { received.forward(To::ticket(1), gpu_ipc::forever, user); });
    auto onward = received.forward(To::ticket(1), gpu_ipc::forever, "frame 7");
    require(std::string(reinterpret_cast<const char *>(gpu_ipc::info_of(onward).user)) == "frame 7", "other bytes");
    require(session.revoke(onward) && !session.revoke(onward), "it was not taken back once");
    received.wait();
    received.wait(other);
    require(received.size() == 4096 && received.ptr() != nullptr && received.region() < 1000, "another block");
    consumer.prefetch({descriptor});
    consumer.abandon(descriptor);
    received.reset();
    require(block.cancel(descriptor), "it was not taken back");
    auto none = block.share(To::one(consumer.id()), After::done());
    require(consumer.claim(none).size() == 4096, "another block");
    gpu_ipc::ShareOptions to_be_read;
    to_be_read.read_only = true;
    auto only_read = consumer.claim(block.share(To::one(consumer.id()), After::done(), to_be_read));
    require(only_read.is_read_only(), "it may be written");
    auto written = consumer.claim(block.share(To::one(consumer.id()), After::done()));
    require(!written.is_read_only() && written.state() == gpu_ipc::State::ready, "it is only read, or not whole");
}

void loans_end(const gpu_ipc::Session &session, const gpu_ipc::Participant &consumer) {
    auto loan = gpu_ipc::Loan::of(session.alloc(4096), After::done());
    auto broadcast = loan.share(To::everybody());
    auto first = consumer.claim(broadcast);
    auto second = consumer.claim(broadcast);
    auto one = loan.share(To::one(consumer.id()));
    require(loan.outstanding() == 3, "a lease for each claim and each grant");
    require(consumer.claim(one).size() == 4096, "another block");
    refuses(GPU_IPC_PARTICIPANT_GONE, "gone", [&] { loan.share(To::one(0)); });
    require(!loan.wait_released(gpu_ipc::no_wait), "it is lent");
    loan.end();
    refuses(GPU_IPC_INVALID, "released", [&] { loan.share(To::everybody()); });
    refuses(GPU_IPC_REVOKED, "taken back", [&] { consumer.claim(broadcast); });
    require(!loan.wait_released(gpu_ipc::no_wait), "it is held");
    first.reset();
    second.reset();
    require(loan.wait_released() && loan.outstanding() == 0, "it is held by no participant");
}

void results_say_what_exceptions_say(const gpu_ipc::Device &device, const gpu_ipc::Session &session) {
    auto block = gpu_ipc::make<gpu_ipc::Block>(gpu_ipc_alloc, session.get(), uint64_t{4096}, int64_t{0});
    require(block && block.has_value() && block->size() == 4096 && (*block).get() == block.value().get(), "no block");
    gpu_ipc::Block taken = std::move(block).value();
    require(gpu_ipc::attempt(gpu_ipc_block_close, taken.release()).has_value(), "it is not closed");
    auto none = gpu_ipc::make<gpu_ipc::Block>(gpu_ipc_alloc, session.get(), UINT64_MAX, int64_t{0});
    require(!none && none.error().code() != GPU_IPC_OK && std::strlen(none.error().what()) > 0, "a block of 16 EiB");
    refuses(none.error().code(), none.error().what(), [&] { none.value(); });
    refuses(none.error().code(), none.error().what(), [&] { std::move(none).value(); });
    auto closed = gpu_ipc::attempt(gpu_ipc_stream_synchronize, nullptr);
    require(!closed && closed.error().code() == GPU_IPC_BAD_HANDLE, "null is a stream");
    refuses(GPU_IPC_BAD_HANDLE, closed.error().what(), [&] { closed.value(); });
    require(gpu_ipc::make<gpu_ipc::Stream>(gpu_ipc_stream_create, device.get()).value().get() != nullptr, "no stream");
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: strict SOCKET\n");
        return 2;
    }
    try {
        a_callback_that_throws();
        require(gpu_ipc::version() == GPU_IPC_VERSION, "the header is of another library");
        gpu_ipc::log_to(-1);
        refuses(GPU_IPC_INVALID, "level", [] { gpu_ipc::log_to(-1, static_cast<gpu_ipc::LogLevel>(9)); });
        accessors_throw();
        auto device = gpu_ipc::Device::open(gpu_ipc::Backend::host);
        auto session = gpu_ipc::Session::open(device, std::string(argv[1]));
        int ends[2];
        require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "no pair");
        session.accept(ends[0]);
        close(ends[0]);
        auto options = gpu_ipc::sized<gpu_ipc_connect_options>();
        options.name = "pair";
        auto consumer = gpu_ipc::Participant::connect_by(device, ends[1], options);
        close(ends[1]);
        require(session.participant_name(session.participants(1).at(0)) == "pair", "another name");
        nothing_is_guessed(session, device, consumer);
        loans_end(session, consumer);
        results_say_what_exceptions_say(device, session);
        consumer.leave();
        session.shutdown();
        session.trim();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "strict: %s\n", error.what());
        return 1;
    }
    at_the_end.armed = true;
    std::printf("strict: nothing was guessed\n");
    return 0;
}
