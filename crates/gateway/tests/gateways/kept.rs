//! A gateway under a keeper, which it ends with.

use std::path::Path;

use harness::program::run_to_end;

use crate::host::{Host, WATCHDOG, address, child_of, watch};

pub fn a_gateway_ends_with_its_keeper() {
    let host = Host::new(0);
    let _brokers = Host::brokers(std::slice::from_ref(&host));
    let keeper = host.kept();
    let mut all = Vec::new();
    watch(
        "the gateway runs, with its carrier and the child that pulls",
        || {
            let gateway = child_of(keeper.pid(), "run");
            let of_it = |name| child_of(gateway?.as_raw_nonzero().get().cast_unsigned(), name);
            all = [gateway, of_it("carrier"), of_it("pulls")]
                .into_iter()
                .flatten()
                .collect();
            all.len() == 3 && host.gateways() == 1
        },
    );
    drop(keeper);
    watch("all have ended", || {
        let is_there = |pid: &rustix::process::Pid| {
            Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
        };
        !all.iter().any(is_there)
    });
    assert_eq!(host.gateways(), 0);
    // One whose keeper died before it could ask to end with it.
    let mut orphan = host.command("run");
    orphan.args(["--listen", &address(), "--insecure", "--transport", "tcp"]);
    let ended = run_to_end(orphan.env("GPU_IPC_GATEWAY_PARENT", "1"), WATCHDOG);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
}
