//! The program's arguments.

use std::path::PathBuf;

use crate::bench::options::{BenchOptions, BenchProcess};
use crate::choice::{BackendChoice, ConsumerOptions, Vendor};
use crate::gateway::HandedOn;
use crate::objects::Asked;
use crate::objects::get::GetOptions;
use crate::objects::keep::KeepOptions;
use crate::objects::list::ObjectsOptions;
use crate::objects::put::PutOptions;
use crate::objects::ready::ReadyOptions;
use crate::objects::remove::RmOptions;
use crate::objects::serve::BrokerOptions;
use crate::patience::seconds;
use crate::size;
use clap::{Args as Arguments, Parser, Subcommand};

/// Share GPU memory between processes, and free it when the last process is done.
#[derive(Parser, Debug)]
#[command(name = "gpu-ipc", version, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  gpu-ipc doctor                                   can memory be shared here, and if not, why?
  gpu-ipc demo                                     see it at work: share, hold, die, reclaim
  gpu-ipc ls                                       which sessions are open here, and which process holds what?
  gpu-ipc top                                      the same, live
  gpu-ipc metrics                                  the same for Prometheus, as OpenMetrics text
  gpu-ipc snapshot --svg memory.svg                where does a session's memory lie? with a picture
  gpu-ipc keep -- gpu-ipc broker                   keep objects: memory that outlives its writer
  gpu-ipc ready                                    wait until both serve
  gpu-ipc put model model.safetensors              fill an object of that broker with a file
  gpu-ipc objects                                  which objects exist, and which processes read them?
  gpu-ipc get model --part embed.weight            write a part of it to standard output
  gpu-ipc rm model                                 remove it; processes that have it mapped keep it
  gpu-ipc reload                                   have the broker read its file of options again
  gpu-ipc stop                                     end keeper and broker; their objects go
  gpu-ipc gateway --listen tcp/10.0.0.1:7447       serve the objects to other hosts
  gpu-ipc pull model                               get an object from another host
  gpu-ipc bench                                    what does sharing cost, compared with the driver's own calls?
  gpu-ipc help demo                                everything about one command

Environment:
  GPU_IPC_RUNTIME_DIR       directory of the sessions' sockets, owned by this user, mode 0700;
                            default $XDG_RUNTIME_DIR/gpu-ipc if that exists, else /tmp/gpu-ipc-UID
  GPU_IPC_HOST_DEVICES      number of shared-memory devices (default 1)
  GPU_IPC_HOST_BYTES        bytes of each (default 1073741824)
  CUDA_VISIBLE_DEVICES      and HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES: which GPUs are visible
  GPU_IPC_HIP_LIBRARY       path of the HIP runtime to load
  GPU_IPC_HIP_PROOF         what the doctor saw work on it: docs/HIP.md
  GPU_IPC_HIP_TRY           steps the doctor also tries on an idle machine: waits, events and read-only can
                            reset a GPU, pools takes most of its memory

Exit status: 0 success, 1 a problem was found, 2 wrong usage, 3 not available here, 141 the output was closed early.")]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Demonstrate it with real processes: share, hold, die, reclaim
    #[command(after_help = "\
Examples:
  gpu-ipc demo                                     on the first GPU, else on shared memory
  gpu-ipc demo --backend host --consumers 16       sixteen consumers, without a GPU
  gpu-ipc demo --blocks 2000 --size 64KiB --json   one JSON object on standard output, for programs

With --json the object has \"ok\", and either the counts or \"error\".

Exit status:
  0  nothing leaked, was reused too early, or had wrong contents
  1  something did, or the demo stopped early, or its output cannot be written
  2  wrong usage
  3  the requested backend has no device here
  141  the output was closed before the verdict: demo | head -1")]
    Demo(DemoOptions),
    /// List the sessions on this host: their memory, and which process holds how much
    #[command(after_help = "\
Examples:
  gpu-ipc ls                           this user's sessions in the runtime directory
  gpu-ipc ls fd32                      the session whose socket's name begins with this
  gpu-ipc ls /run/app/s                the session that listens there; exit status 1 if it does not answer
  gpu-ipc ls --json | jq '.sessions[].holders'

A session that does not answer within --timeout shows as hung: its process hangs or is stopped.
With --json the object has \"ok\", as the exit status, and \"sessions\" or \"error\": docs/TOOLS.md.

Exit status:
  0  the sessions were listed
  1  one that was named does not answer
  2  wrong usage
  3  the runtime directory cannot be read")]
    Ls(LsOptions),
    /// Show the sessions on this host, live
    #[command(after_help = "\
Examples:
  gpu-ipc top                          this user's sessions, every second
  gpu-ipc top /run/app/s --interval 0.2

Keys: up and down choose a session, p pauses, q quits.

Exit status:
  0  you pressed q
  1  the terminal or the runtime directory failed while it ran
  2  wrong usage
  3  standard output is not a terminal, or one without cursor control")]
    Top(TopOptions),
    /// Print sessions and the broker as OpenMetrics text, for Prometheus
    #[command(after_help = "\
Examples:
  gpu-ipc metrics                                        this user's sessions and broker
  gpu-ipc metrics --dir /run/objects                     this broker; broker --metrics ADDRESS serves them itself
  gpu-ipc metrics >/var/lib/node_exporter/gpu-ipc.prom   from a timer, for node_exporter's textfile collector

Exit status:
  0  the metrics were printed; a session that does not answer has gpu_ipc_session_up 0
  2  wrong usage
  3  the runtime directory cannot be read")]
    Metrics(MetricsOptions),
    /// Show where a session's memory lies: a histogram, a map, a picture
    #[command(after_help = "\
Examples:
  gpu-ipc snapshot                       the only session that is open here
  gpu-ipc snapshot fd32                  the session whose socket's name begins with this; gpu-ipc ls shows the names
  gpu-ipc snapshot /run/app/s --svg memory.svg
  gpu-ipc snapshot /run/app/s --json | jq '.snapshot.stats'

While it lists its memory, the session answers no other process. If the application brought an allocator of its own,
there is a snapshot only if that implements one. docs/TOOLS.md explains every word and sign.

Exit status:
  0  the snapshot was shown
  1  there is no such session, it does not answer or has no snapshot, or the picture cannot be written
  2  wrong usage")]
    Snapshot(SnapshotOptions),
    /// Keep a broker's memory open, and restart the broker when it dies
    #[command(after_help = "\
Examples:
  gpu-ipc keep -- gpu-ipc broker
  gpu-ipc keep --dir /run/objects -- gpu-ipc broker --device cuda:0 --limit 40GiB
  gpu-ipc keep --dir /run/objects                  keep alone: another process starts `gpu-ipc broker --keeper`
  gpu-ipc keep -- gpu-ipc gateway --listen tcp/10.0.0.1:7447 --insecure

No object is lost when either the broker or the keeper is killed: docs/OBJECTS.md. A keeper that systemd started tells
it when both are ready, how both stand, and that it lives.

Exit status:
  0  the broker ended by itself
  1  another keeper is in the directory, or the broker cannot be started
  2  wrong usage, or two directories")]
    Keep(KeepOptions),
    /// Serve objects: GPU memory that outlives the process that filled it
    #[command(after_help = "\
Examples:
  gpu-ipc keep -- gpu-ipc broker                   restarted when it dies, with all its objects
  gpu-ipc broker --device host:0 --limit 1GiB      without a keeper: its objects end with it

A broker that finds another one in its directory waits until that ends.

Exit status:
  1  the directory or the keeper cannot be used
  2  wrong usage, or a device does not exist")]
    Broker(BrokerOptions),
    /// Wait until a broker serves and its keeper has everything
    #[command(after_help = "\
Examples:
  gpu-ipc ready                                    in a script, behind `gpu-ipc keep`
  gpu-ipc ready --broker --timeout 5               as a probe

Exit status:
  0  so it is
  1  it is not within the time: what is missing is on standard error
  2  wrong usage")]
    Ready(ReadyOptions),
    /// End a keeper and its broker: all objects go, but for what is mapped
    #[command(after_help = "\
Examples:
  gpu-ipc stop --dir /run/objects

Exit status:
  0  both are gone
  1  one does not end: its driver keeps it in the kernel
  2  wrong usage")]
    Stop(Asked),
    /// Have a broker read its file of options again
    #[command(after_help = "\
Examples:
  gpu-ipc reload --dir /run/objects

Exit status:
  0  the options of the file hold
  1  they do not, and those before them hold: what is wrong is on standard error, with file and line
  2  wrong usage")]
    Reload(Asked),
    /// List a broker's objects, and the processes that read them
    #[command(after_help = "\
Examples:
  gpu-ipc objects
  gpu-ipc objects model
  gpu-ipc objects --sort bytes
  gpu-ipc objects --json | jq '.objects[].readers'
  gpu-ipc objects --all-hosts                      what the gateways of all hosts announce: docs/HOSTS.md

Exit status:
  0  the objects were listed
  1  no broker answers, or it has no object of this name
  2  wrong usage
  3  --all-hosts: gpu-ipc-gateway is not installed")]
    Objects(ObjectsOptions),
    /// Put files into an object, and print its epoch
    #[command(after_help = "\
Examples:
  gpu-ipc put model model-00001.safetensors model-00002.safetensors
  gpu-ipc put model weights.bin --expect 3         only if the latest epoch is 3
  gpu-ipc put model weights.bin --replace          if there is no room for two epochs
  zstd -dc model.zst | gpu-ipc put model /dev/stdin  a pipe is read to its end first, into a file in $TMPDIR

Exit status:
  0  the object is visible
  1  it is not: the reason is on standard error
  2  wrong usage")]
    Put(PutOptions),
    /// Write a part of an object to standard output, or all of it into files
    #[command(after_help = "\
Examples:
  gpu-ipc get model --all files                    the files that it was filled with
  gpu-ipc get model --safetensors model.safetensors
  gpu-ipc get model --parts                        which parts, of which type and shape
  gpu-ipc get model --part lm_head.weight > lm_head.bin
  gpu-ipc get model --epoch 3 --part lm_head.weight | sha256sum

Exit status:
  0  the bytes were written
  1  there is no such object or part
  2  wrong usage")]
    Get(GetOptions),
    /// Remove a name with all its epochs; processes that have one mapped keep it
    #[command(after_help = "\
Examples:
  gpu-ipc rm model
  gpu-ipc rm model --epoch 3
  gpu-ipc rm model --force                         what a process still fills, too

Exit status:
  0  it is gone
  1  there is no such name, or it is another user's
  2  wrong usage")]
    Rm(RmOptions),
    /// Serve this host's objects to other hosts
    #[command(after_help = "\
Examples:
  gpu-ipc gateway --listen tcp/10.0.0.1:7447 --tls host.pem host.key authority.pem
  gpu-ipc gateway --listen tcp/10.0.0.2:7447 --peer tcp/10.0.0.1:7447 --tls host.pem host.key authority.pem
  gpu-ipc gateway --listen tcp/127.0.0.1:7447 --insecure --broker /run/objects --device cuda:0
  gpu-ipc gateway --status --json                  what the gateways of this host do

Runs gpu-ipc-gateway from beside this program or from the path; `gpu-ipc-gateway run --help` lists its options, and
docs/HOSTS.md explains them.

Exit status:
  2  wrong usage, or the broker, the address or the library that carries the bytes cannot be used
  3  gpu-ipc-gateway is not installed")]
    Gateway(HandedOn),
    /// Get an object from another host
    #[command(after_help = "\
Examples:
  gpu-ipc pull model                               the newest epoch, from any host that has it
  gpu-ipc pull model --epoch 3 --from 10-0-0-1     this epoch, from this host
  gpu-ipc pull model --json                        the figures as JSON: bytes, gb_s, retries

Runs gpu-ipc-gateway from beside this program or from the path; `gpu-ipc-gateway pull --help` lists its options. Without
--peer it uses the network of the gateway that runs for the broker here.

Exit status:
  0    the object is here
  1    it is not: the reason is on standard error
  2    wrong usage, or the broker, the network or the library that carries the bytes cannot be used
  3    gpu-ipc-gateway is not installed
  137  a transfer neither ended nor failed: the process was ended, and its memory with it")]
    Pull(HandedOn),
    /// Check whether memory can be shared here, and say why if it cannot
    #[command(after_help = "\
Examples:
  gpu-ipc doctor                                   a report to read, or to paste into an issue
  gpu-ipc doctor --require cuda                    fail unless an NVIDIA GPU can be shared
  gpu-ipc doctor --require cuda,host --json        one JSON object on standard output, for programs

On each device it shares a block with a child process, which checks the contents. Each driver runs in a child process:
one that crashes or hangs is reported and does no harm. docs/TOOLS.md explains every line.

Exit status:
  0  every required backend works
  1  a required backend has no working device, or a kernel feature is missing that all backends need
  2  wrong usage")]
    Doctor(DoctorOptions),
    /// Measure what sharing costs, each call beside the raw driver calls that it needs
    #[command(after_help = "\
Examples:
  gpu-ipc bench                                    everything, on the first GPU, else on shared memory
  gpu-ipc bench --backend host --only protocol limbo
  gpu-ipc bench --backend cuda --json
  gpu-ipc bench --jobs                             a camera, weights, a KV cache, beside copies through host memory
  gpu-ipc bench --replay trace.csv                 replay an allocator's log on this allocator

Compare ratios between machines, not medians. docs/SPEED.md explains each row and its floor.

Exit status:
  0  every row was measured, whether it reaches its goal or not
  1  a row could not be measured, or a file cannot be read
  2  wrong usage
  3  the requested backend has no device here")]
    Bench(BenchOptions),
    /// A process of the benchmark (started by it)
    #[command(hide = true, subcommand)]
    BenchProcess(BenchProcess),
    /// A consumer of the demo (started by it)
    #[command(hide = true)]
    DemoConsumer(ConsumerOptions),
    /// A process of the doctor (started by it)
    #[command(hide = true, subcommand)]
    DoctorProcess(DoctorProcess),
}

/// A process of the doctor.
#[derive(Subcommand, Debug)]
pub enum DoctorProcess {
    /// Tries one driver
    Backend(BackendOptions),
    /// A consumer
    Consumer(ConsumerOptions),
    /// Tries to make namespaces
    Namespaces,
}

/// Options of `demo`.
#[derive(Arguments, Debug)]
pub struct DemoOptions {
    /// Which backend to use
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendChoice,
    /// Consumer processes that live to the end; two more are killed
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    pub consumers: u32,
    /// Number of blocks to share
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        default_value_t = 200,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub blocks: u32,
    /// Bytes of each block: a number, or one with KiB, MiB or GiB behind it
    #[arg(
        long,
        value_name = "BYTES",
        allow_negative_numbers = true,
        default_value = "64KiB",
        value_parser = size::parse
    )]
    pub size: u64,
    /// Seed of the blocks' contents
    #[arg(
        long,
        value_name = "S",
        allow_negative_numbers = true,
        default_value_t = 1
    )]
    pub seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Which sessions to ask, and for how long.
#[derive(Arguments, Debug)]
pub struct Where {
    /// Sessions to ask, each by the path of its socket or the beginning of its name in the runtime
    /// directory [default: all of that directory]
    #[arg(value_name = "SESSION")]
    pub sessions: Vec<PathBuf>,
    /// Seconds that each session has to answer
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 1.0, value_parser = seconds)]
    pub timeout: f64,
}

/// Options of `ls`.
#[derive(Arguments, Debug)]
pub struct LsOptions {
    /// Where the sessions are.
    #[command(flatten)]
    pub place: Where,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Options of `metrics`.
#[derive(Arguments, Debug)]
pub struct MetricsOptions {
    /// Where the sessions are.
    #[command(flatten)]
    pub place: Where,
    /// The directory of a broker, which is then asked also beside sessions that are named; else
    /// that of `gpu-ipc broker`
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Options of `top`.
#[derive(Arguments, Debug)]
pub struct TopOptions {
    /// Where the sessions are.
    #[command(flatten)]
    pub place: Where,
    /// Seconds between updates
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 1.0, value_parser = seconds)]
    pub interval: f64,
}

/// Options of `snapshot`.
#[derive(Arguments, Debug)]
pub struct SnapshotOptions {
    /// The session: the path of its socket, or the beginning of the socket's name in the runtime
    /// directory
    pub session: Option<PathBuf>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Also draw a picture into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Seconds that the session has to answer
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 10.0, value_parser = seconds)]
    pub timeout: f64,
}

/// Options of `doctor`.
#[derive(Arguments, Debug)]
pub struct DoctorOptions {
    /// Fail unless this backend has a working device; repeatable, or separated by commas
    #[arg(long, value_enum, value_name = "BACKEND", value_delimiter = ',')]
    pub require: Vec<Vendor>,
    /// How long a driver may take for one step before it counts as hung
    #[arg(
        long,
        value_name = "SECONDS",
        allow_negative_numbers = true,
        default_value_t = 120,
        value_parser = clap::value_parser!(u32).range(1..=86_400)
    )]
    pub timeout: u32,
    /// Print one JSON object instead of a report to read
    #[arg(long)]
    pub json: bool,
}

/// Options of the process that tries one driver.
#[derive(Arguments, Debug)]
pub struct BackendOptions {
    /// The backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
