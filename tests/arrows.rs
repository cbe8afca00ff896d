//! The arrows between the crates point one way: `docs/DESIGN.md` says which.

use std::collections::BTreeMap;
use std::process::Command;

/// Each of our packages, and which of ours it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("gpu-ipc-gpu-api", &[]),
    ("gpu-ipc-backend-host", &["gpu-ipc-gpu-api"]),
    ("gpu-ipc-backend-cuda", &["gpu-ipc-gpu-api"]),
    ("gpu-ipc-backend-hip", &["gpu-ipc-gpu-api"]),
    ("gpu-ipc-hip-on-cuda", &["gpu-ipc-gpu-api", "gpu-ipc-backend-host"]),
    ("gpu-ipc-channel", &["gpu-ipc-gpu-api"]),
    ("gpu-ipc-ipc-rc", &["gpu-ipc-gpu-api", "gpu-ipc-channel", "gpu-ipc-allocators"]),
    // On `ipc-rc` for streams alone.
    ("gpu-ipc-broker", &["gpu-ipc-gpu-api", "gpu-ipc-channel", "gpu-ipc-ipc-rc"]),
    ("gpu-ipc-allocators", &["gpu-ipc-gpu-api"]),
    // On `ipc-rc` for blocks and streams: what it sends to PyTorch is a block of a session.
    ("gpu-ipc-torch", &["gpu-ipc-gpu-api", "gpu-ipc-ipc-rc"]),
    (
        "gpu-ipc",
        &[
            "gpu-ipc-gpu-api",
            "gpu-ipc-backend-host",
            "gpu-ipc-backend-cuda",
            "gpu-ipc-backend-hip",
            "gpu-ipc-ipc-rc",
            "gpu-ipc-allocators",
            "gpu-ipc-broker",
            "gpu-ipc-torch",
        ],
    ),
    ("gpu-ipc-conformance", &["gpu-ipc"]),
    ("gpu-ipc-lab", &["gpu-ipc"]),
    ("gpu-ipc-cli", &["gpu-ipc", "gpu-ipc-lab"]),
    ("gpu-ipc-python", &["gpu-ipc"]),
];

#[test]
fn every_crate_depends_only_on_those_below_it() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let packages = metadata["packages"].as_array().expect("a list");
    assert_eq!(packages.len(), ALLOWED.len(), "a crate came or went: say here what it may depend on");
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let below = allowed.get(name).unwrap_or_else(|| panic!("{name}: say here what it may depend on"));
        for dependency in package["dependencies"].as_array().expect("a list") {
            let on = dependency["name"].as_str().expect("a name");
            // Tests may look anywhere: `kind` is null for an ordinary dependency.
            if dependency["kind"].is_null() && on.starts_with("gpu-ipc") {
                assert!(below.contains(&on), "{name} must not depend on {on}");
            }
        }
    }
}
