//! Tells the program with which profile it is built: Cargo tells build scripts alone, and by a
//! path.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `target/PROFILE/build/PACKAGE/out`. The variable `PROFILE` knows `debug` and `release` and no
    // other.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let folder = out
        .ancestors()
        .skip_while(|path| !path.ends_with("build"))
        .nth(1)
        .and_then(|path| path.file_name());
    let profile = folder.map_or("unknown".into(), |name| name.to_string_lossy());
    println!("cargo::rustc-env=GPU_IPC_PROFILE={profile}");
}
