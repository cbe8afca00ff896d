//! Programs in C and C++ against the library as it is installed: compiled with every warning, run on the host backend.
//!
//! Without a compiler of the language its programs are ignored, and shown so; `ci/capi` requires both.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use libtest_mimic::{Arguments, Failed, Trial};

const C: &[&str] = &["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-pthread"];
const CPP: &[&str] =
    &["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-pthread"];

/// The programs, and what the last line that they print begins with.
const PROGRAMS: &[(&str, &str)] = &[("examples/first.c", "1048576 bytes that begin with seven")];

fn main() {
    let trial = |&(source, says): &(&'static str, &'static str)| {
        let name = format!("programs::{}", source.replace(['/', '.'], "_"));
        let trial = Trial::test(name, move || {
            let dir = tempfile::tempdir()?;
            let program = compile(&root().join(source), dir.path(), &[])?;
            let output = run(Command::new(program).arg(dir.path().join("socket")))?;
            let text = String::from_utf8_lossy(&output.stdout);
            let last = text.lines().last().unwrap_or_default();
            if last.starts_with(says) { Ok(()) } else { Err(format!("it says {last:?}, not {says:?}").into()) }
        });
        trial.with_ignored_flag(compiler(Path::new(source)).is_none())
    };
    libtest_mimic::run(&Arguments::from_args(), PROGRAMS.iter().map(trial).collect()).exit();
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Names the compiler of a source's language, if there is one.
fn compiler(source: &Path) -> Option<(String, &'static [&'static str])> {
    let (variable, usual, flags) = match source.extension().and_then(OsStr::to_str) {
        Some("c") => ("CC", "cc", C),
        _ => ("CXX", "c++", CPP),
    };
    let name = std::env::var(variable).unwrap_or_else(|_| usual.into());
    Command::new(&name).arg("--version").output().is_ok_and(|output| output.status.success()).then_some((name, flags))
}

/// Installs the library once, and returns the prefix.
fn prefix() -> Result<&'static Path, Failed> {
    static PREFIX: OnceLock<Result<tempfile::TempDir, String>> = OnceLock::new();
    let made = PREFIX.get_or_init(|| {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let here = std::env::current_exe().map_err(|error| error.to_string())?;
        let library = here.with_file_name("libgpu_ipc_c.so");
        let mut install = Command::new(root().join("packaging/install"));
        run(install.arg(dir.path()).arg(library)).map_err(|error| error.message().unwrap_or_default().to_owned())?;
        Ok(dir)
    });
    made.as_ref().map(tempfile::TempDir::path).map_err(Failed::from)
}

/// Compiles a program against the prefix.
fn compile(source: &Path, to: &Path, more: &[&str]) -> Result<PathBuf, Failed> {
    let (compiler, flags) = compiler(source).ok_or("no compiler")?;
    let (prefix, program) = (prefix()?, to.join("program"));
    let libraries = prefix.join("lib");
    let mut command = Command::new(compiler);
    command.args(flags).args(more).arg("-I").arg(prefix.join("include")).arg(source).arg("-o").arg(&program);
    command.arg("-L").arg(&libraries).arg("-lgpu_ipc").arg(format!("-Wl,-rpath,{}", libraries.display()));
    run(&mut command)?;
    Ok(program)
}

fn run(command: &mut Command) -> Result<Output, Failed> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Err(format!("{command:?}: {}\n{out}{err}", output.status).into())
}
