//! Against PyTorch's own code, without a GPU.
//!
//! Needs a Python with PyTorch built for CUDA (the functions that speak of counters are only
//! there): `python3`, or the program that `GPU_IPC_PYTHON` names. Everything shows as ignored
//! without one; with `REQUIRE_TORCH=1` that is a failure.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use gpu_ipc::backend::DeviceUuid;
use gpu_ipc::torch::{
    CounterFile, CounterName, Dtype, Fields, Layout, Released, SLOTS, TensorMessage,
};
use harness::Lines;
use harness::program::{ends_well, example, run_to_end};
use libtest_mimic::{Arguments, Failed, Trial};

const CASES: &[(&str, fn())] = &[
    (
        "pytorch_decreases_our_counter_and_leaves_our_file",
        pytorch_decreases_our_counter_and_leaves_our_file,
    ),
    (
        "pytorch_unlinks_our_file_when_it_is_the_last",
        pytorch_unlinks_our_file_when_it_is_the_last,
    ),
    (
        "we_join_a_file_of_pytorchs_and_leave_it",
        we_join_a_file_of_pytorchs_and_leave_it,
    ),
    (
        "python_writes_the_bytes_that_rust_does",
        python_writes_the_bytes_that_rust_does,
    ),
    (
        "python_reads_the_bytes_that_rust_writes",
        python_reads_the_bytes_that_rust_writes,
    ),
    ("the_producers_example", the_producers_example),
    ("the_trainers_example", the_trainers_example),
];
/// A process that takes longer counts as hung.
const WATCHDOG: Duration = Duration::from_secs(600);

fn main() {
    let found = ends_well(Command::new(python()).args([
        "-W",
        "ignore",
        "-c",
        "import torch; torch.UntypedStorage._release_ipc_counter_cuda",
    ]));
    let required = std::env::var_os("REQUIRE_TORCH").is_some();
    let trial = |&(name, run): &(&str, fn())| {
        Trial::test(name, move || {
            assert!(found, "{} has no PyTorch that knows CUDA", python());
            run();
            Ok::<(), Failed>(())
        })
        .with_ignored_flag(!found && !required)
    };
    libtest_mimic::run(&Arguments::from_args(), CASES.iter().map(trial).collect()).exit();
}

fn python() -> String {
    std::env::var("GPU_IPC_PYTHON").unwrap_or_else(|_| "python3".into())
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch")
}

/// A Python that does with PyTorch what each line says.
struct Torch(Lines);

impl Torch {
    fn start() -> Torch {
        let mut python = Command::new(python());
        let mut torch = Torch(Lines::start(python.arg(folder().join("counters.py"))));
        println!("PyTorch {}", torch.answer());
        torch
    }

    fn answer(&mut self) -> String {
        self.0.line().expect("PyTorch is there")
    }

    fn ask(&mut self, line: &str) -> String {
        self.0.tell(line);
        self.answer()
    }
}

fn path(name: &CounterName) -> PathBuf {
    Path::new("/dev/shm").join(&name.as_str()[1..])
}

fn pytorch_decreases_our_counter_and_leaves_our_file() {
    let (mut torch, file) = (Torch::start(), CounterFile::create().expect("room"));
    for slot in [0, 77, SLOTS - 1] {
        file.grant(slot);
        file.grant(slot.saturating_sub(1));
        torch.ask(&format!("release {} {slot}", file.name().as_str()));
        assert_eq!((file.count(slot), file.users()), (0, 1), "slot {slot}");
        if slot > 0 {
            assert_eq!(file.count(slot - 1), 1, "the one before {slot}");
        }
    }
    // PyTorch finds nothing wrong with a file that is there no more.
    let name = file.name().as_str().to_owned();
    drop(file);
    assert_eq!(torch.ask(&format!("release {name} 0")), "released");
}

fn pytorch_unlinks_our_file_when_it_is_the_last() {
    let (mut torch, file) = (Torch::start(), CounterFile::create().expect("room"));
    file.grant(3);
    let name = file.name().clone();
    // As if this process had ended without leaving: the count is what PyTorch adds.
    let bytes = std::fs::OpenOptions::new()
        .write(true)
        .open(path(&name))
        .expect("it is there");
    std::os::unix::fs::FileExt::write_at(&bytes, &0i32.to_ne_bytes(), 0).expect("written");
    torch.ask(&format!("release {} 3", name.as_str()));
    assert_eq!((path(&name).exists(), file.count(3)), (false, 0));
    std::mem::forget(file);
}

fn we_join_a_file_of_pytorchs_and_leave_it() {
    let mut torch = Torch::start();
    let name = CounterName::new(torch.ask(&format!("make {SLOTS}")).as_bytes())
        .expect("PyTorch's names are good");
    assert_eq!(
        std::fs::metadata(path(&name)).expect("it is there").len(),
        64 + 8 * u64::from(SLOTS)
    );
    let file = CounterFile::attach(&name).expect("it has the form of a counter file");
    let users = file.users();
    assert!(users >= 2, "{users}");
    assert_eq!((file.count(0), file.count(SLOTS - 1)), (7, 7));
    assert_eq!(file.release(SLOTS - 1), Released::Yes);
    assert_eq!(
        (torch.ask("see 9999"), torch.ask("see 9998")),
        ("6".into(), "7".into())
    );
    // The last process unlinks: here it is us.
    torch.ask("drop");
    assert_eq!(file.users(), users - 1);
    assert!(path(&name).exists());
    drop(file);
    assert!(!path(&name).exists());
}

/// The tuple that counters.py has too.
fn message() -> TensorMessage {
    let fields = Fields {
        device: 3,
        handle: Some(vec![7; 64]),
        size_bytes: 0x1000,
        offset_bytes: 0x200,
        ref_counter_handle: Some(b"/torch_1_2_3".to_vec()),
        ref_counter_offset: 5,
        event_handle: Some(vec![9; 64]),
        event_sync_required: true,
    };
    let layout = Layout {
        dtype: Dtype::F32,
        offset: 1,
        shape: vec![3],
        strides: vec![4],
    };
    TensorMessage {
        fields,
        uuid: Some(DeviceUuid([8; 16])),
        layout,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn python_writes_the_bytes_that_rust_does() {
    assert_eq!(
        Torch::start().ask("pack"),
        hex(&message().encode().expect("good"))
    );
}

fn python_reads_the_bytes_that_rust_writes() {
    let mut torch = Torch::start();
    let read = torch.ask(&format!(
        "unpack {}",
        hex(&message().encode().expect("good"))
    ));
    let handles = (r"\x07".repeat(64), r"\t".repeat(64), r"\x08".repeat(16));
    let expected = format!(
        "((3, b'{}', 4096, 512, b'/torch_1_2_3', 5, b'{}', True), b'{}', torch.float32, 1, (3,), (4,))",
        handles.0, handles.1, handles.2
    );
    assert_eq!(read, expected);
    // A storage of no bytes is four times None.
    let nothing = TensorMessage {
        fields: Fields::default(),
        uuid: None,
        layout: Layout::contiguous(Dtype::Bool, &[0]),
    };
    let read = torch.ask(&format!("unpack {}", hex(&nothing.encode().expect("good"))));
    assert_eq!(
        read,
        "((0, None, 0, 0, None, 0, None, False), None, torch.bool, 0, (0,), (1,))"
    );
}

/// Runs one side's program to its end; it checks itself, and its children end with it.
fn run(command: &mut Command) -> Output {
    // Nothing here is worth a thread for each core.
    run_to_end(command.env("OMP_NUM_THREADS", "1"), WATCHDOG)
}

#[track_caller]
fn passed(output: &Output, checks: usize) {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    let summary = format!(": {checks} checks passed, 0 failed, 0 skipped");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && last.ends_with(&summary),
        "{text}{errors}"
    );
}

/// Starts Python on one of the examples with shared memory in place of a GPU.
fn stand_in() -> Command {
    let mut command = Command::new(python());
    command.arg(folder().join("stand_in.py"));
    command
}

fn the_producers_example() {
    // One word: what the program starts in place of Python.
    let dir = tempfile::tempdir().expect("a directory");
    let script = dir.path().join("python");
    let line = format!(
        "#!/bin/sh\nexec '{}' '{}' \"$@\"\n",
        python(),
        folder().join("stand_in.py").display()
    );
    std::fs::write(&script, line).expect("room");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .expect("it is ours");
    let mut command = Command::new(example("torch_producer"));
    command
        .args([
            "--backend",
            "host",
            "--big-mib",
            "16",
            "--count",
            "10100",
            "--python",
        ])
        .arg(script);
    command
        .arg("--consumer")
        .arg(folder().join("../../testing/torch/consumer.py"));
    passed(&run(&mut command), 32);
}

fn the_trainers_example() {
    let mut command = stand_in();
    command.arg(folder().join("../../testing/torch/trainer.py"));
    command.args([
        "--backend",
        "host",
        "--big-mib",
        "16",
        "--count",
        "10100",
        "--consumer",
    ]);
    passed(&run(command.arg(example("torch_consumer"))), 32);
}
