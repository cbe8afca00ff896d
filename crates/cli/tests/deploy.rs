//! The files of `deploy` do what they say: systemd's unit, line by line and under a systemd of its
//! own in namespaces, and the pods of Kubernetes in namespaces.
//!
//! What a machine has not (systemd, namespaces that this user may make) shows as ignored. The
//! manifest against Kubernetes' schema: `ci/test/deploy`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::program::{Running, ends_well, output};
use harness::surroundings::{contain, has_namespaces};
use harness::wait_until;
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process};

const UNIT: &str = include_str!("../deploy/gpu-ipc-broker.service");
/// What the unit's broker allows, and where it finds that.
const OPTIONS: &str = include_str!("../deploy/broker.toml");
const OPTIONS_PATH: &str = "/etc/gpu-ipc/broker.toml";
const PODS: &str = include_str!("../deploy/kubernetes.yaml");
const GATEWAYS_POD: &str = include_str!("../deploy/kubernetes-gateway.yaml");
const GATEWAYS_UNIT: &str = include_str!("../deploy/gpu-ipc-gateway.service");
const IMAGE: &str = include_str!("../deploy/Containerfile");
const PROGRAM: &str = env!("CARGO_BIN_EXE_gpu-ipc");

fn main() {
    let arguments = Arguments::from_args();
    let (lacks_systemd, lacks_manager, lacks_namespaces) = if arguments.list {
        (false, false, false)
    } else {
        (!has_systemd(), Manager::is_barred(), !has_namespaces())
    };
    let trial = |name: &str, case: fn()| {
        Trial::test(name, move || {
            std::panic::catch_unwind(case).map_err(|_| Failed::without_message())
        })
    };
    let trials = vec![
        trial("systemd_takes_the_unit", systemd_takes_the_unit).with_ignored_flag(lacks_systemd),
        trial(
            "the_unit_is_exposed_to_little",
            the_unit_is_exposed_to_little,
        )
        .with_ignored_flag(lacks_systemd),
        trial("systemd_runs_the_unit", systemd_runs_the_unit).with_ignored_flag(lacks_manager),
        trial(
            "the_image_is_what_the_pods_run",
            the_image_is_what_the_pods_run,
        ),
        trial(
            "the_units_lines_start_restart_and_stop",
            the_units_lines_start_restart_and_stop,
        ),
        trial(
            "two_engines_pods_share_the_brokers_directory_alone",
            pods_share_a_directory_alone,
        )
        .with_ignored_flag(lacks_namespaces),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

fn has_systemd() -> bool {
    ends_well(Command::new("systemd-analyze").arg("--version"))
}

fn systemd_takes_the_unit() {
    let dir = tempfile::tempdir().expect("a directory");
    // What it says of this unit; others of the machine are none of ours.
    let verify_as = |name: &str, unit: &str| -> String {
        let path = dir.path().join(name);
        fs::write(&path, unit).expect("written");
        let mut command = Command::new("systemd-analyze");
        let verified = output(command.args(["verify", "--man=no"]).arg(&path));
        let said = String::from_utf8(verified.stderr).expect("text");
        said.lines().filter(|line| line.contains(name)).collect()
    };
    let verify = |unit: &str| verify_as("gpu-ipc-broker.service", unit);
    // It looks whether the program is there.
    let unit = UNIT.replace("/usr/bin/gpu-ipc", PROGRAM);
    assert_eq!(verify(&unit), "");
    let wrong = verify(&unit.replace("KillMode=process", "KillMode=keeper"));
    assert!(
        wrong.contains("kill mode"),
        "a wrong unit is taken: {wrong:?}"
    );
    let verify = |unit: &str| verify_as("gpu-ipc-gateway.service", unit);
    let gateway = GATEWAYS_UNIT.replace("/usr/bin/gpu-ipc-gateway", PROGRAM);
    assert_eq!(verify(&gateway), "");
    let wrong = verify(&gateway.replace("Restart=always", "Restart=ever"));
    assert!(
        wrong.contains("restart specifier"),
        "a wrong unit is taken: {wrong:?}"
    );
}

/// By systemd's own scale, of which 10 is the worst.
fn the_unit_is_exposed_to_little() {
    let dir = tempfile::tempdir().expect("a directory");
    let is_below = |unit: &str, threshold: &str| {
        let path = dir.path().join("gpu-ipc-broker.service");
        fs::write(&path, unit).expect("written");
        let mut command = Command::new("systemd-analyze");
        command.args([
            "security",
            "--offline=true",
            "--no-pager",
            "--threshold",
            threshold,
        ]);
        let judged = output(command.arg(&path));
        let said = String::from_utf8_lossy(&judged.stdout).into_owned();
        assert!(said.contains("Overall exposure level"), "{judged:?}");
        (judged.status.success(), said)
    };
    let (is_hard, said) = is_below(UNIT, "35");
    assert!(is_hard, "{said}");
    let soft = UNIT
        .replace("CapabilityBoundingSet=\n", "")
        .replace("ProtectSystem=strict\n", "");
    let soft = soft.replace("SystemCallFilter=@system-service\n", "");
    assert!(
        !is_below(&soft, "35").0,
        "a unit with all capabilities passes"
    );
}

/// A systemd that is the first process of its own namespaces, with this directory of units.
struct Manager {
    process: Running,
    group: PathBuf,
}

impl Manager {
    /// Says what keeps this machine from having one.
    fn is_barred() -> bool {
        let Some(groups) = Self::groups() else {
            return true;
        };
        let group = groups.join(format!("gpu-ipc-{}", std::process::id()));
        let is_barred = fs::create_dir(&group).is_err()
            || !Path::new("/lib/systemd/systemd").exists()
            || !ends_well(
                Command::new("unshare").args(["--pid", "--fork", "--mount", "--cgroup", "true"]),
            );
        let _ = fs::remove_dir(&group);
        is_barred
    }

    /// Finds the second hierarchy of control groups, which systemd needs.
    fn groups() -> Option<PathBuf> {
        let mounts = fs::read_to_string("/proc/mounts").ok()?;
        let mut fields = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>());
        let found = fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?;
        Some(found[1].into())
    }

    fn start(units: &Path) -> Manager {
        const SCRIPT: &str = r#"
            set -e
            echo $$ >"$2/cgroup.procs"
            exec unshare --pid --fork --kill-child --mount --uts --ipc --cgroup sh -ec '
                mount --make-rprivate /
                mount -t proc proc /proc
                umount -R /sys/fs/cgroup
                mount -t cgroup2 cgroup2 /sys/fs/cgroup
                mount -t tmpfs -o mode=755 tmpfs /run
                mkdir -p /run/systemd/system
                cp -r "$0"/. /run/systemd/system
                cp "$1" /run/gpu-ipc
                exec env -i container=test PATH="$PATH" /lib/systemd/systemd --system --unit=only.target \
                    --log-target=console --show-status=no
            ' "$0" "$1"
        "#;
        let name = format!("gpu-ipc-{}", std::process::id());
        let group = Self::groups().expect("it was there").join(name);
        fs::create_dir(&group).expect("a control group");
        let mut command = Command::new("sh");
        command
            .args(["-c", SCRIPT])
            .arg(units)
            .arg(PROGRAM)
            .arg(&group);
        let process = Running::start(&mut command);
        let manager = Manager { process, group };
        wait_until("systemd answers", || {
            let state = manager.run(&["systemctl", "is-system-running"]);
            state.is_some_and(|state| state.stdout.starts_with(b"running"))
        });
        manager
    }

    /// Runs a command beside it, when it is there.
    fn run(&self, words: &[&str]) -> Option<Output> {
        let systemd = child_of(self.process.pid())?;
        let mut command = Command::new("nsenter");
        command.args([
            "-t",
            &systemd.to_string(),
            "-p",
            "-m",
            "-u",
            "-i",
            "-C",
            "--",
        ]);
        command.args(words).env("GPU_IPC_HOST_BYTES", "1073741824");
        Some(output(&mut command))
    }

    /// As [`run`](Manager::run), with what a command that ends well says.
    #[track_caller]
    fn well(&self, words: &[&str]) -> String {
        let ran = self.run(words).expect("systemd is there");
        if !ran.status.success() {
            let status = self.run(&["systemctl", "status", "--no-pager", "-l", SERVICE]);
            panic!(
                "{words:?}: {ran:?}\n{}",
                String::from_utf8_lossy(&status.expect("there").stdout)
            );
        }
        String::from_utf8(ran.stdout).expect("text").trim().into()
    }

    /// Returns a property of the unit.
    fn property(&self, name: &str) -> String {
        self.well(&["systemctl", "show", "--value", "-p", name, SERVICE])
    }

    /// Returns the broker's listing.
    fn listing(&self) -> serde_json::Value {
        let listed = self.run(&[
            "/run/gpu-ipc",
            "objects",
            "--json",
            "--dir",
            "/run/gpu-ipc-broker",
        ]);
        listed
            .and_then(|listed| serde_json::from_slice(&listed.stdout).ok())
            .unwrap_or_default()
    }

    /// Returns the number of a process as the test sees it: processes know it by another one.
    fn kill(&self, signal: &str, pid: &str) {
        self.well(&["kill", signal, pid]);
    }

    fn wait_for_restarts(&self, count: &str) {
        wait_until("the unit is started again, and ready", || {
            self.property("NRestarts") == count && self.property("ActiveState") == "active"
        });
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.process.kill();
        wait_until("its control groups are empty", || {
            fn remove(group: &Path) -> bool {
                let below = fs::read_dir(group).into_iter().flatten().flatten();
                below
                    .filter(|entry| entry.path().is_dir())
                    .for_each(|entry| {
                        remove(&entry.path());
                    });
                fs::remove_dir(group).is_ok()
            }
            remove(&self.group)
        });
    }
}

const SERVICE: &str = "gpu-ipc-broker.service";

fn systemd_runs_the_unit() {
    let units = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        let path = units.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("written");
    };
    let unit = UNIT
        .replace("/usr/bin/gpu-ipc", "/run/gpu-ipc")
        .replace("cuda:0", "host:0");
    let options = "/run/systemd/system/broker.toml";
    let unit = unit.replace(OPTIONS_PATH, options).replace(":9400", ":0");
    write(SERVICE, &unit);
    write("broker.toml", &OPTIONS.replace("40GiB", "512MiB"));
    write("only.target", "[Unit]\nDefaultDependencies=no\n");
    // Nothing else of this machine is started for it; and a watchdog that a test can wait for.
    let less = "[Unit]\nDefaultDependencies=no\n[Service]\nWatchdogSec=3\nEnvironment=GPU_IPC_HOST_BYTES=1073741824\n";
    write(&format!("{SERVICE}.d/test.conf"), less);
    let manager = Manager::start(units.path());
    // Returns when it is ready: the broker serves, and its keeper has everything.
    manager.well(&["systemctl", "start", SERVICE]);
    let listing = manager.listing();
    assert_eq!(
        (&listing["ok"], &listing["keeper"]),
        (&true.into(), &"fed".into()),
        "{listing}"
    );
    let (keeper, broker) = (manager.property("MainPID"), listing["pid"].to_string());
    wait_until("the status says how both stand", || {
        let status = manager.property("StatusText");
        status.contains(&format!("process {broker}"))
            && status.contains("the keeper has everything")
    });
    let told = ["OOMScoreAdjust", "LimitNOFILE"].map(|name| manager.property(name));
    assert_eq!(told, ["-900", "65536"]);
    // Without CAP_SYS_RESOURCE systemd passes over the one, and goes as far as it may with the other.
    let spare = "echo -900 >/proc/self/oom_score_adj";
    let may_be_spared = ends_well(Command::new("sh").args(["-c", spare]));
    let own = getrlimit(Resource::Nofile)
        .maximum
        .filter(|_| !may_be_spared);
    let most = own.unwrap_or(u64::MAX).min(65_536);
    for pid in [&keeper, &broker] {
        let of = |file: &str| manager.well(&["cat", &format!("/proc/{pid}/{file}")]);
        if may_be_spared {
            assert_eq!(of("oom_score_adj"), "-900");
        }
        let limits = of("limits");
        let files = limits
            .lines()
            .find(|line| line.starts_with("Max open files"))
            .expect("a limit");
        assert!(files.contains(&most.to_string()), "{files}");
        assert!(
            of("status").contains("CapEff:\t0000000000000000"),
            "it has capabilities"
        );
    }
    let file = units.path().join("weights.bin");
    fs::write(&file, vec![7; 10_000]).expect("a file");
    let path = file.to_str().expect("a plain name");
    let dir = ["--dir", "/run/gpu-ipc-broker"];
    let put = ["/run/gpu-ipc", "put", "model", path, "--backend", "host"];
    assert_eq!(manager.well(&[&put[..], &dir].concat()), "1");
    let get = || {
        let get = ["/run/gpu-ipc", "get", "model", "--backend", "host"];
        manager
            .run(&[&get[..], &dir].concat())
            .expect("systemd is there")
            .stdout
            == vec![7; 10_000]
    };
    // Other options, and then a mistake in them, which fails the reload and changes nothing.
    let limit = || manager.listing()["limit"].as_u64();
    assert_eq!(limit(), Some(512 << 20));
    let edit = |text: &str| {
        manager.well(&["sh", "-c", r#"echo "$0" >"$1""#, text, options]);
    };
    edit("limit = '256MiB'");
    manager.well(&["systemctl", "reload", SERVICE]);
    assert_eq!(limit(), Some(256 << 20));
    edit("limit = 'much'");
    let bad = manager.run(&["systemctl", "reload", SERVICE]);
    assert!(!bad.expect("systemd is there").status.success());
    assert_eq!(limit(), Some(256 << 20));
    assert_eq!(manager.listing()["pid"].to_string(), broker);
    assert_eq!(manager.property("ActiveState"), "active");
    // The keeper dies, and the broker gives everything to the next one.
    manager.kill("-KILL", &keeper);
    manager.wait_for_restarts("1");
    let second = manager.property("MainPID");
    assert_ne!(second, keeper);
    assert_eq!(
        manager.listing()["pid"].to_string(),
        broker,
        "the broker lives on"
    );
    assert!(get());
    // The keeper hangs: the watchdog ends it.
    manager.kill("-STOP", &second);
    manager.wait_for_restarts("2");
    assert_eq!(
        manager.listing()["pid"].to_string(),
        broker,
        "the broker lives on"
    );
    // The broker is ended, as for another version of it: its keeper starts the next one.
    manager.kill("-TERM", &broker);
    wait_until("another broker", || {
        let listing = manager.listing();
        let now = listing["pid"].to_string();
        listing["ok"] == true && now != broker
    });
    assert!(get(), "the keeper had it");
    assert_eq!(manager.property("NRestarts"), "2", "the keeper stayed");
    let pids = [
        manager.property("MainPID"),
        manager.listing()["pid"].to_string(),
    ];
    manager.well(&["systemctl", "stop", SERVICE]);
    assert_eq!(
        (manager.property("ActiveState"), manager.property("Result")),
        ("inactive".into(), "success".into())
    );
    for pid in pids {
        let left = manager
            .run(&["test", "-e", &format!("/proc/{pid}")])
            .expect("systemd is there");
        assert!(!left.status.success(), "process {pid} is left");
    }
}

/// No machine here builds it: each word of it is compared with what the sources have.
fn the_image_is_what_the_pods_run() {
    let line = |start: &str| {
        let mut lines = IMAGE.lines().filter_map(|line| line.strip_prefix(start));
        let line = lines.next().unwrap_or_else(|| panic!("no {start:?}"));
        assert_eq!(lines.next(), None, "{start:?} twice");
        line
    };
    assert_eq!(
        line("RUN cargo build "),
        "--locked --profile dist -p gpu-ipc-cli"
    );
    assert_eq!(
        line("RUN cd crates/gateway "),
        "&& cargo build --locked --release"
    );
    assert_eq!(
        line("COPY --from=build /src/target/"),
        "dist/gpu-ipc /usr/bin/gpu-ipc"
    );
    assert_eq!(
        line("COPY --from=build /src/crates/"),
        "gateway/target/release/gpu-ipc-gateway /usr/bin/gpu-ipc-gateway"
    );
    assert_eq!(line("ENTRYPOINT "), r#"["gpu-ipc"]"#);
    let manifest = include_str!("../../../Cargo.toml");
    assert!(manifest.contains("[profile.dist]"));
    assert!(include_str!("../Cargo.toml").contains("name = \"gpu-ipc-cli\""));
    assert_eq!(
        PODS.matches("image: gpu-ipc\n").count(),
        2,
        "the keeper and the broker"
    );
    assert_eq!(GATEWAYS_POD.matches("image: gpu-ipc\n").count(), 1);
}

/// Returns the value of a setting, as systemd would run it on this machine, with `dir` for the
/// runtime directory.
fn setting(name: &str, dir: &Path) -> String {
    let mut values = UNIT
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let value = values.next().unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(values.next(), None, "{name} twice");
    let dir = dir.to_str().expect("a plain name");
    value
        .replace("%t", dir)
        .replace("/usr/bin/gpu-ipc", PROGRAM)
        .replace("cuda:0", "host:0")
        .replace(":9400", ":0")
        .replace(OPTIONS_PATH, &format!("{dir}/broker.toml"))
}

/// Lists the processes that are brokers in a directory, or wait to be.
fn brokers(dir: &Path) -> Vec<i32> {
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let told = [
        b"NVIDIA_DRA_LOCAL_IPC_DIR=",
        dir.as_os_str().as_encoded_bytes(),
    ]
    .concat();
    let is_broker = |pid: &i32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let (command, variables) = (read("cmdline"), read("environ"));
        command.split(|byte| *byte == 0).nth(1) == Some(b"broker")
            && variables
                .split(|byte| *byte == 0)
                .any(|variable| variable == told)
    };
    numbers.filter(is_broker).collect()
}

/// What systemd does with the unit: starts its main process, sees its end, stops it.
struct Service {
    runtime: tempfile::TempDir,
    main: Option<Running>,
}

impl Service {
    fn dir(&self) -> PathBuf {
        self.runtime.path().join("gpu-ipc-broker")
    }

    fn start(&mut self) {
        let options = OPTIONS.replace("40GiB", "512MiB");
        fs::write(self.runtime.path().join("broker.toml"), options).expect("written");
        let line = setting("ExecStart", self.runtime.path());
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).env("GPU_IPC_HOST_BYTES", "1073741824");
        self.main = Some(Running::start(&mut command));
    }

    /// Runs the program in the unit's directory.
    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        command
            .args(args)
            .arg("--dir")
            .arg(self.dir())
            .env("GPU_IPC_HOST_BYTES", "1073741824");
        output(&mut command)
    }

    /// Waits for a broker whose keeper has everything, and returns its process.
    fn serving(&self) -> i32 {
        let mut pid = 0;
        wait_until("a broker with a keeper", || {
            let listing: serde_json::Value =
                serde_json::from_slice(&self.run(&["objects", "--json"]).stdout)
                    .unwrap_or_default();
            pid = listing["pid"].as_i64().unwrap_or_default() as i32;
            listing["ok"] == true && listing["keeper"] == "fed"
        });
        pid
    }

    fn kill_main(&mut self) {
        self.main = None;
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill_main();
        let dir = self.dir();
        wait_until("no broker is left", || {
            let left = brokers(&dir);
            for pid in left.iter().filter_map(|&pid| Pid::from_raw(pid)) {
                let _ = kill_process(pid, Signal::KILL);
            }
            left.is_empty()
        });
    }
}

fn the_units_lines_start_restart_and_stop() {
    let mut service = Service {
        runtime: tempfile::tempdir().expect("a directory"),
        main: None,
    };
    // As RuntimeDirectory= makes it.
    assert_eq!(
        setting("RuntimeDirectory", service.runtime.path()),
        "gpu-ipc-broker"
    );
    fs::create_dir(service.dir()).expect("a directory");
    fs::set_permissions(service.dir(), fs::Permissions::from_mode(0o755)).expect("ours");
    service.start();
    let broker = service.serving();
    let file = service.runtime.path().join("weights.bin");
    fs::write(&file, vec![7; 10_000]).expect("a file");
    let put = service.run(&[
        "put",
        "model",
        file.to_str().expect("a plain name"),
        "--backend",
        "host",
    ]);
    assert!(put.status.success(), "{put:?}");
    // The keeper dies. KillMode=process leaves its broker, and Restart=always starts the line
    // again.
    assert_eq!(setting("KillMode", service.runtime.path()), "process");
    assert_eq!(setting("Restart", service.runtime.path()), "always");
    service.kill_main();
    service.start();
    assert_eq!(
        service.serving(),
        broker,
        "the broker that was there feeds the new keeper"
    );
    wait_until("the new keeper's own broker waits", || {
        brokers(&service.dir()).len() == 2
    });
    kill_process(Pid::from_raw(broker).expect("a process"), Signal::KILL).expect("it is ours");
    wait_until("another broker", || service.serving() != broker);
    let get = || service.run(&["get", "model", "--backend", "host"]).stdout;
    assert_eq!(get(), vec![7; 10_000], "kept by the second keeper");
    // Once more, so that a broker waits when the unit is stopped.
    service.kill_main();
    service.start();
    service.serving();
    wait_until("the third keeper's own broker waits", || {
        brokers(&service.dir()).len() == 2
    });
    let line = setting("ExecReload", service.runtime.path());
    let mut words = line.split_whitespace();
    let mut reload = Command::new(words.next().expect("a program"));
    let reloaded = output(reload.args(words));
    assert!(reloaded.status.success(), "{reloaded:?}");
    let line = setting("ExecStop", service.runtime.path());
    let mut words = line.split_whitespace();
    let mut stop = Command::new(words.next().expect("a program"));
    let stopped = output(stop.args(words));
    assert!(stopped.status.success(), "{stopped:?}");
    let main = service.main.as_mut().expect("it runs");
    main.wait();
    wait_until("nobody is left", || brokers(&service.dir()).is_empty());
}

/// Returns the arguments of the keeper's container and of the broker's, as they are on this machine.
fn arguments_of_the_pods() -> [Vec<String>; 2] {
    let lines = PODS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("args: [")?.strip_suffix(']'));
    let arguments = |line: &str| {
        let words = line.split(", ").map(|word| word.trim_matches('"'));
        let here = words.map(|word| match word {
            "/run/objects" => "/mnt",
            "cuda:0" => "host:0",
            "40GiB" => "512MiB",
            "0.0.0.0:9400" => "127.0.0.1:0",
            word => word,
        });
        here.map(str::to_owned).collect()
    };
    let all: Vec<Vec<String>> = lines.map(arguments).collect();
    all.try_into().expect("two containers have arguments")
}

/// Returns the only child of a process.
fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

fn pods_share_a_directory_alone() {
    // What the node shares lies at /mnt in these containers, as nothing else that can be written
    // does.
    let mount = "mountPath: /run/objects}";
    assert_eq!(
        PODS.matches(mount).count(),
        3,
        "the keeper's pod, the broker's and the engines'"
    );
    assert_eq!(
        PODS.matches("volumeMounts").count(),
        3,
        "and nothing else is shared"
    );
    assert!(PODS.contains("replicas: 2") && !PODS.contains("hostIPC") && !PODS.contains("hostPID"));
    let env = "- {name: NVIDIA_DRA_LOCAL_IPC_DIR, value: /run/objects}";
    assert!(
        PODS.contains(env),
        "what tells an engine where the broker is"
    );
    let node = tempfile::tempdir().expect("a directory");
    let program = Path::new(PROGRAM);
    let [keeper, broker] = arguments_of_the_pods();
    // A container that is killed with everything in it.
    let pod = |arguments: &[String]| {
        let mut pod = contain(node.path(), program);
        Running::start(pod.args(arguments).env("GPU_IPC_HOST_BYTES", "1073741824"))
    };
    let run = |args: &[&str]| {
        let mut engine = contain(node.path(), program);
        engine
            .args(args)
            .env("NVIDIA_DRA_LOCAL_IPC_DIR", "/mnt")
            .env("GPU_IPC_HOST_BYTES", "1073741824");
        output(&mut engine)
    };
    let is_ready = |which: &[&str]| {
        let ready = run(&[&["ready", "--timeout", "60"], which].concat());
        assert!(ready.status.success(), "{ready:?}");
    };
    let mut pods = [pod(&keeper), pod(&broker)];
    is_ready(&["--keeper"]);
    is_ready(&["--broker"]);
    is_ready(&[]);
    // The one file that is known to be in every container, and large: the program.
    let weights = fs::read(program).expect("the program");
    let put = run(&["put", "model", PROGRAM]);
    assert!(put.status.success(), "{put:?}");
    let listing = || -> serde_json::Value {
        serde_json::from_slice(&run(&["objects", "--json"]).stdout).expect("JSON")
    };
    let get = || run(&["get", "model"]).stdout == weights;
    assert!(
        get(),
        "another engine, in namespaces of its own, has every byte"
    );
    // An update of the broker, then one of the keeper, then the broker again: as a DaemonSet does
    // it, the old pod ends before the new one starts, and its preStop has waited.
    for replaced in [1, 0, 1] {
        is_ready(&[]);
        pods[replaced].kill();
        let other = run(&["ready", "--timeout", "0.1"]);
        assert!(
            !other.status.success(),
            "a broker without a keeper, or none, is not ready"
        );
        pods[replaced] = pod(if replaced == 0 { &keeper } else { &broker });
        is_ready(&[]);
        assert!(get(), "nothing is lost when pod {replaced} is replaced");
    }
    let listing = listing();
    assert_eq!(
        (&listing["restored"], &listing["objects"][0]["readers"]),
        (&1.into(), &serde_json::json!([]))
    );
    assert_eq!(listing["limit"], 512 << 20);
}
