//! Names the shared library as the loader shall know it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs that are linked with it ask for this name. Before 1.0 every minor version is another
    // interface, as CMake's version file says too.
    let number =
        |name: &str| std::env::var(format!("CARGO_PKG_VERSION_{name}")).expect("cargo sets it");
    let interface = match number("MAJOR").as_str() {
        "0" => format!("0.{}", number("MINOR")),
        major => major.to_owned(),
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpu_ipc.so.{interface}");
}
