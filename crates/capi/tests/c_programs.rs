//! Programs in C and C++ against the library as it is installed: compiled with every warning, run
//! on the host backend, and against sides in Rust.
//!
//! Without a compiler of the language its programs are ignored, and shown so; `ci/test/capi` requires
//! both.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpu_ipc::broker::{Broker, Limits, Options};
use gpu_ipc::{After, BackendKind, Gpu, Participant, Session, Stream, To, Wait, detect};
use libtest_mimic::{Arguments, Failed, Trial};

const C: &[&str] = &[
    "-std=c11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Wshadow",
    "-Wundef",
    "-Wcast-align",
    "-Werror",
    "-pthread",
];
const CPP: &[&str] = &[
    "-std=c++17",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Wshadow",
    "-Wundef",
    "-Wold-style-cast",
    "-Werror",
    "-pthread",
];

/// The programs that take a path for a socket, and what the last line that they print begins with.
const PROGRAMS: &[(&str, &str)] = &[
    ("examples/first.c", "1048576 bytes that begin with seven"),
    ("examples/ring.cpp", "300 frames through 4 blocks"),
    (
        "examples/events.cpp",
        "a participant joined, read a block, and left",
    ),
    ("tests/c/misuse.c", "misuse: every call gave its code"),
    ("tests/c/usual.c", "usual: all went well"),
    ("tests/c/strict.c", "strict: nothing was guessed"),
    ("tests/c/strict.cpp", "strict: nothing was guessed"),
];

/// A case, the program of its side in C, and what runs both.
type Exchange = (&'static str, &'static str, fn() -> Result<(), Failed>);

/// Programs of which one side is in Rust, or a broker.
const EXCHANGES: &[Exchange] = &[
    (
        "a_consumer_in_c_of_a_producer_in_rust",
        "examples/consumer.c",
        a_consumer_in_c_of_a_producer_in_rust,
    ),
    (
        "a_consumer_in_rust_of_a_producer_in_c",
        "examples/producer.c",
        a_consumer_in_rust_of_a_producer_in_c,
    ),
    (
        "hot_swap_of_an_object",
        "examples/hot_swap.c",
        hot_swap_of_an_object,
    ),
    (
        "objects_are_taken_over_and_copied",
        "tests/c/objects.c",
        objects_are_taken_over_and_copied,
    ),
    (
        "pools_are_adopted_and_read",
        "tests/c/pools.c",
        pools_are_adopted_and_read,
    ),
    ("pools_in_cpp", "tests/c/pools.cpp", pools_in_cpp),
];

/// In the environment of a process of this binary that is a broker: its directory.
const BROKER: &str = "GPU_IPC_C_PROGRAMS_BROKER";

fn main() {
    if let Some(dir) = std::env::var_os(BROKER) {
        return be_a_broker(dir.into());
    }
    let programs = PROGRAMS.iter().map(|&(source, says)| {
        let trial = Trial::test(
            format!("programs::{}", source.replace(['/', '.'], "_")),
            move || runs(source, says),
        );
        trial.with_ignored_flag(compiler(Path::new(source)).is_none())
    });
    let exchanges = EXCHANGES.iter().map(|&(name, source, run)| {
        Trial::test(format!("exchanges::{name}"), run)
            .with_ignored_flag(compiler(Path::new(source)).is_none())
    });
    let has_compilers = ["a.c", "a.cpp"]
        .iter()
        .all(|name| compiler(Path::new(name)).is_some());
    let alone = [
        Trial::test(
            "nothing_is_exported_but_what_is_listed",
            nothing_is_exported_but_what_is_listed,
        )
        .with_ignored_flag(Command::new("nm").arg("--version").output().is_err()),
        Trial::test(
            "what_is_installed_is_stripped_and_has_one_name",
            what_is_installed_is_stripped_and_has_one_name,
        )
        .with_ignored_flag(Command::new("readelf").arg("--version").output().is_err()),
        Trial::test(
            "the_programs_of_the_page_run_as_they_stand",
            the_programs_of_the_page_run,
        )
        .with_ignored_flag(!has_compilers),
        Trial::test("an_old_language_is_one_error", an_old_language_is_one_error)
            .with_ignored_flag(!has_compilers),
    ];
    libtest_mimic::run(
        &Arguments::from_args(),
        programs.chain(exchanges).chain(alone).collect(),
    )
    .exit();
}

fn runs(source: &'static str, says: &'static str) -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let program = compile(source, dir.path())?;
    let mut command = watched(&program);
    command.arg(dir.path().join("socket"));
    if source.contains("misuse") {
        // A second library of the process, as a wheel beside a system's is.
        let other = dir.path().join("other.so");
        std::fs::copy(library()?, &other)?;
        command.arg(other);
    }
    let output = run(&mut command)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    if last.starts_with(says) {
        Ok(())
    } else {
        Err(format!("it says {last:?}, not {says:?}").into())
    }
}

fn gpu() -> gpu_ipc::Result<Gpu> {
    detect()?.first(BackendKind::Host)
}

fn a_consumer_in_c_of_a_producer_in_rust() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let gpu = gpu()?;
    let stream = Stream::create(&gpu)?;
    let session = Session::builder(gpu)
        .socket(dir.path().join("socket"))
        .open()?;
    let mut command = watched(&compile("examples/consumer.c", dir.path())?);
    let mut child = command
        .arg(session.socket_path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to = child.stdin.take().ok_or("no input")?;
    let mut from = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let consumer = session.wait_for_participants(1, Some(Duration::from_secs(60)))?[0];
    for number in 0..20u64 {
        let block = session.alloc(1 << 16)?;
        stream.write(&block, &number.to_le_bytes())?;
        let descriptor = block.share(To::Participant(consumer), After::Stream(&stream))?;
        writeln!(to, "{}", hex(descriptor.as_bytes()))?;
    }
    drop(to);
    let told = from.by_ref().collect::<Result<Vec<_>, _>>()?;
    succeeds(child)?;
    let must: Vec<String> = (0..20).map(|number| number.to_string()).collect();
    if told != must {
        return Err(format!("it told {told:?}").into());
    }
    let report = session.shutdown(Duration::from_secs(60));
    if report.clean {
        Ok(())
    } else {
        Err(report.to_string().into())
    }
}

fn a_consumer_in_rust_of_a_producer_in_c() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("socket");
    let gpu = gpu()?;
    let stream = Stream::create(&gpu)?;
    let mut command = watched(&compile("examples/producer.c", dir.path())?);
    let mut child = command
        .arg(&socket)
        .arg("20")
        .stdout(Stdio::piped())
        .spawn()?;
    let from = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let participant = loop {
        match Participant::builder(gpu.clone()).connect(&socket) {
            Ok(participant) => break participant,
            Err(gpu_ipc::Error::Connect { .. }) if child.try_wait()?.is_none() => {
                std::thread::yield_now()
            }
            Err(error) => return Err(error.into()),
        }
    };
    let mut number = 0;
    for line in from {
        let descriptor = unhex(&line?)?;
        let block = participant.claim(
            &descriptor,
            Wait::Stream(&stream),
            Some(Duration::from_secs(60)),
        )?;
        let mut bytes = [0; 8];
        stream.read(&block, &mut bytes)?;
        if u64::from_le_bytes(bytes) != number {
            return Err(format!("block {number} has {bytes:?}").into());
        }
        number += 1;
    }
    participant.close(Some(Duration::from_secs(60)))?;
    succeeds(child)?;
    if number == 20 {
        Ok(())
    } else {
        Err(format!("{number} of 20 blocks came").into())
    }
}

fn hot_swap_of_an_object() -> Result<(), Failed> {
    let text = beside_a_broker("examples/hot_swap.c", &["8"])?;
    if text.contains("moves at one address") && text.ends_with("8 epochs\n") {
        Ok(())
    } else {
        Err(text.into())
    }
}

fn objects_are_taken_over_and_copied() -> Result<(), Failed> {
    goes_well_beside_a_broker("tests/c/objects.c", "objects: all went well\n")
}

fn pools_are_adopted_and_read() -> Result<(), Failed> {
    goes_well_beside_a_broker("tests/c/pools.c", "pools: all went well\n")
}

fn pools_in_cpp() -> Result<(), Failed> {
    goes_well_beside_a_broker("tests/c/pools.cpp", "pools: all went well\n")
}

fn goes_well_beside_a_broker(source: &'static str, says: &str) -> Result<(), Failed> {
    let text = beside_a_broker(source, &[])?;
    if text == says {
        Ok(())
    } else {
        Err(text.into())
    }
}

/// Runs a program that is told the directory of a broker, and returns what it prints.
fn beside_a_broker(source: &'static str, arguments: &[&str]) -> Result<String, Failed> {
    let dir = tempfile::tempdir()?;
    let objects = dir.path().join("objects");
    std::fs::create_dir(&objects)?;
    let mut broker = Command::new(std::env::current_exe()?)
        .env(BROKER, &objects)
        .spawn()?;
    let done = (|| {
        while !objects.join("broker").exists() {
            if broker.try_wait()?.is_some() {
                return Err("the broker has ended".into());
            }
            std::thread::yield_now();
        }
        let mut command = watched(&compile(source, dir.path())?);
        run(command.arg(&objects).args(arguments))
    })();
    broker.kill()?;
    broker.wait()?;
    Ok(String::from_utf8_lossy(&done?.stdout).into_owned())
}

fn be_a_broker(dir: PathBuf) {
    let gpus = Arc::new(|| Ok(detect()?.gpus().to_vec()));
    let options = Options {
        dir,
        gpus,
        limits: Limits::default(),
        allowed: Default::default(),
        keeper: None,
    };
    Broker::open(options).expect("a broker").run()
}

fn nothing_is_exported_but_what_is_listed() -> Result<(), Failed> {
    let output = run(Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library()?))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let exported: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    let list = std::fs::read_to_string(root().join("symbols.txt"))?;
    let listed: BTreeSet<&str> = list.lines().collect();
    let differ: Vec<_> = exported.symmetric_difference(&listed).collect();
    if differ.is_empty() {
        Ok(())
    } else {
        Err(format!("in one of library and list alone: {differ:?}").into())
    }
}

/// The name that programs ask the loader for is the one that CMake has, and that of a file: before
/// 1.0 with the minor version in it.
fn what_is_installed_is_stripped_and_has_one_name() -> Result<(), Failed> {
    let prefix = prefix()?;
    let library = prefix.join("lib/libgpu_ipc.so");
    let read = |what: &str| run(Command::new("readelf").args(["-W", what]).arg(&library));
    let sections = read("-S")?;
    if String::from_utf8_lossy(&sections.stdout).contains(" .debug_") {
        return Err("the library has debug information".into());
    }
    let version = env!("CARGO_PKG_VERSION");
    let mut numbers = version.split('.');
    let interface = match (numbers.next(), numbers.next()) {
        (Some("0"), Some(minor)) => format!("0.{minor}"),
        (Some(major), _) => major.to_owned(),
        _ => return Err(format!("no version: {version}").into()),
    };
    let name = format!("libgpu_ipc.so.{interface}");
    let dynamic = read("-d")?;
    let asked = format!("Library soname: [{name}]");
    if !String::from_utf8_lossy(&dynamic.stdout).contains(&asked) {
        return Err(format!("the library has another name than {name}").into());
    }
    let cmake = prefix.join("lib/cmake/gpu_ipc/gpu_ipcConfig.cmake");
    if !std::fs::read_to_string(cmake)?.contains(&format!("IMPORTED_SONAME \"{name}\"")) {
        return Err(format!("CMake has another name than {name}").into());
    }
    std::fs::metadata(prefix.join("lib").join(&name))?;
    Ok(())
}

/// Writes each program of docs/C.md to a file, and returns them in the order of the page.
fn programs_of_the_page(to: &Path) -> Result<Vec<PathBuf>, Failed> {
    let page = std::fs::read_to_string(root().join("../../docs/C.md"))?;
    let mut programs = Vec::new();
    for (at, part) in page
        .split("\n```")
        .enumerate()
        .filter(|(at, _)| at % 2 == 1)
    {
        let (language, text) = part.split_once('\n').ok_or("a fence without a text")?;
        if matches!(language, "c" | "cpp") {
            let path = to.join(format!("page{at}.{language}"));
            std::fs::write(&path, text)?;
            programs.push(path);
        }
    }
    Ok(programs)
}

fn the_programs_of_the_page_run() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let mut compiled = Vec::new();
    for source in programs_of_the_page(dir.path())? {
        let to = dir.path().join(source.file_stem().ok_or("no name")?);
        std::fs::create_dir(&to)?;
        compiled.push(compile(&source.to_string_lossy(), &to)?);
    }
    let [producer, consumer, both] = &compiled[..] else {
        return Err(format!("{} programs are on the page, not 3", compiled.len()).into());
    };
    let socket = dir.path().join("socket");
    let mut producing = watched(producer)
        .arg(&socket)
        .stdout(Stdio::piped())
        .spawn()?;
    let descriptor = producing.stdout.take().ok_or("no output")?;
    let output = run(watched(consumer).arg(&socket).stdin(descriptor))?;
    succeeds(producing)?;
    let alone = run(watched(both).arg(dir.path().join("alone")))?;
    match (&output.stdout[..], &alone.stdout[..]) {
        (b"seven\n", b"seven\n") => Ok(()),
        other => Err(format!("they print {other:?}").into()),
    }
}

/// What a compiler before C99 and C++11 says of the header.
fn an_old_language_is_one_error() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    for (name, old, enough) in [
        ("h.c", "-std=c89", "-std=c11"),
        ("h.cpp", "-std=c++98", "-std=c++11"),
    ] {
        let source = dir.path().join(name);
        std::fs::write(&source, "#include <gpu_ipc.h>\n")?;
        let (compiler, _) = compiler(&source).ok_or("no compiler")?;
        let check = |standard| {
            let mut command = Command::new(&compiler);
            command.args([
                standard,
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-fsyntax-only",
                "-I",
            ]);
            command.arg(root().join("include")).arg(&source).output()
        };
        let (refused, taken) = (check(old)?, check(enough)?);
        let text = String::from_utf8_lossy(&refused.stderr);
        // A preprocessor before C99 warns of apostrophes in `//`, whatever is left out.
        let errors = text.lines().filter(|line| line.contains("error:"));
        if refused.status.success()
            || errors.count() != 1
            || !text.contains("gpu_ipc.h needs C11 or C++11")
        {
            return Err(format!("{old}: {text}").into());
        }
        if !taken.status.success() || !taken.stderr.is_empty() {
            return Err(format!("{enough}: {}", String::from_utf8_lossy(&taken.stderr)).into());
        }
    }
    Ok(())
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the library that cargo built beside this binary.
fn library() -> Result<PathBuf, Box<dyn Error>> {
    Ok(std::env::current_exe()?.with_file_name("libgpu_ipc_c.so"))
}

/// Names the compiler of a source's language, if there is one.
fn compiler(source: &Path) -> Option<(String, &'static [&'static str])> {
    let (variable, usual, flags) = match source.extension().and_then(OsStr::to_str) {
        Some("c") => ("CC", "cc", C),
        _ => ("CXX", "c++", CPP),
    };
    let name = std::env::var(variable).unwrap_or_else(|_| usual.into());
    Command::new(&name)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
        .then_some((name, flags))
}

/// Installs the library once, and returns the prefix.
fn prefix() -> Result<&'static Path, Failed> {
    static PREFIX: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = PREFIX.get_or_init(|| {
        // In the target folder, since nothing drops a static.
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("prefix");
        let library = library().map_err(|error| error.to_string())?;
        let mut install = Command::new(root().join("packaging/install"));
        run(install.arg(&prefix).arg(library))
            .map_err(|error| error.message().unwrap_or_default().to_owned())?;
        Ok(prefix)
    });
    made.as_deref().map_err(Failed::from)
}

/// Compiles a program against the prefix.
fn compile(source: &str, to: &Path) -> Result<PathBuf, Failed> {
    let source = root().join(source);
    let (compiler, flags) = compiler(&source).ok_or("no compiler")?;
    let (prefix, program) = (prefix()?, to.join("program"));
    let libraries = prefix.join("lib");
    let mut command = Command::new(compiler);
    command
        .args(flags)
        // The program that calls by results.
        .args(source.ends_with("events.cpp").then_some("-fno-exceptions"))
        .arg("-I")
        .arg(prefix.join("include"))
        .arg(source)
        .arg("-o")
        .arg(&program);
    command
        .arg("-L")
        .arg(&libraries)
        .arg("-lgpu_ipc")
        .arg("-ldl");
    run(command.arg(format!("-Wl,-rpath,{}", libraries.display())))?;
    Ok(program)
}

/// Begins a command that is killed when it hangs.
fn watched(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg("300").arg(program);
    command
}

fn run(command: &mut Command) -> Result<Output, Failed> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    Err(format!("{command:?}: {}\n{out}{err}", output.status).into())
}

fn succeeds(mut child: Child) -> Result<(), Failed> {
    let status = child.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("the program ended with {status}").into())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>, std::num::ParseIntError> {
    let byte = |at| u8::from_str_radix(text.get(at..at + 2).unwrap_or("?"), 16);
    (0..text.len()).step_by(2).map(byte).collect()
}
