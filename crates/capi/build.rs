//! Names the shared library as the loader shall know it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs that are linked with it ask for this name. It changes when a function goes or
    // changes its meaning.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpu_ipc.so.0");
}
