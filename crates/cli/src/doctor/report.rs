//! All that was found, for people and for programs.

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width};
use gpu_ipc::BackendKind;
use serde::Serialize;

use super::backend::{Backend, Device};
use super::check::{Check, CheckState};
use crate::size;

/// The number of the shape of the JSON object. Fields are added under the same number, and changed
/// under the next.
const SHAPE: u32 = 1;
/// Columns where nobody says, and the least and the most that are used.
const COLUMNS: u16 = 80;
const FEWEST: u16 = 60;
const MOST: u16 = 110;
/// Columns of the mark and of the name, the spaces around them among them.
const MARK: u16 = 6;
const NAME: u16 = 24;

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The number of this shape.
    shape: u32,
    /// The program's version.
    program: &'static str,
    /// Whatever is required works.
    pub ok: bool,
    /// The backends that are required.
    required: Vec<&'static str>,
    /// Why it is not ok, a sentence each.
    failed: Vec<String>,
    /// The kernel's error.
    kernel: Vec<Check>,
    /// Limits and places.
    limits: Vec<Check>,
    /// The backends.
    backends: Vec<Backend>,
}

impl Report {
    /// Puts together what was found, and judges it.
    pub fn new(
        required: &[BackendKind],
        kernel: Vec<Check>,
        limits: Vec<Check>,
        backends: Vec<Backend>,
    ) -> Report {
        let fatal = kernel
            .iter()
            .chain(&limits)
            .filter(|check| check.is_fatal());
        let mut failed: Vec<String> = fatal
            .map(|check| format!("{}: {}", check.name, check.found))
            .collect();
        for kind in required {
            match backends
                .iter()
                .find(|backend| backend.backend == kind.name())
            {
                Some(backend) if backend.works() => {}
                found => failed.push(format!(
                    "{kind} is required and has no working device{}",
                    because(found)
                )),
            }
        }
        if !backends.iter().any(Backend::works) {
            failed.push("no backend has a working device".into());
        }
        let required = required.iter().map(|kind| kind.name()).collect();
        let (ok, program) = (failed.is_empty(), env!("CARGO_PKG_VERSION"));
        Report {
            shape: SHAPE,
            program,
            ok,
            required,
            failed,
            kernel,
            limits,
            backends,
        }
    }

    /// Makes one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("the report is made of strings and numbers")
    }

    /// Makes what people read, and paste.
    pub fn text(&self, columns: Option<u16>) -> String {
        let columns = columns.unwrap_or(COLUMNS).clamp(FEWEST, MOST);
        let mut parts = vec![format!("gpu-ipc {} doctor", self.program)];
        for backend in &self.backends {
            let mut rows = vec![Row::of_backend(backend)];
            rows.extend(backend.checks.iter().map(Row::of));
            parts.push(section(
                &format!("Backend {}", backend.backend),
                rows,
                columns,
            ));
            for device in &backend.devices {
                let rows = std::iter::once(Row::of_device(device))
                    .chain(device.checks.iter().map(Row::of))
                    .collect();
                parts.push(section(
                    &format!("Device {} of {}", device.number, backend.backend),
                    rows,
                    columns,
                ));
            }
        }
        parts.push(section(
            "Kernel",
            self.kernel.iter().map(Row::of).collect(),
            columns,
        ));
        parts.push(section(
            "Limits and places",
            self.limits.iter().map(Row::of).collect(),
            columns,
        ));
        parts.push(self.verdict());
        parts.join("\n\n")
    }

    fn verdict(&self) -> String {
        let works: Vec<&str> = self
            .backends
            .iter()
            .filter(|backend| backend.works())
            .map(|backend| &*backend.backend)
            .collect();
        let works = if works.is_empty() {
            "no backend".into()
        } else {
            works.join(", ")
        };
        let broken: Vec<&str> = self
            .backends
            .iter()
            .filter(|b| b.state == CheckState::Failed)
            .map(|b| &*b.backend)
            .collect();
        let mut lines = vec![format!(
            "Memory can be shared between processes here on: {works}."
        )];
        if !broken.is_empty() {
            lines.push(format!("Something is wrong with: {}.", broken.join(", ")));
        }
        lines.extend(self.failed.iter().map(|why| format!("FAIL  {why}")));
        lines.join("\n")
    }
}

fn because(backend: Option<&Backend>) -> String {
    let Some(backend) = backend else {
        return String::new();
    };
    let broken = backend
        .devices
        .iter()
        .flat_map(|device| &device.checks)
        .find(|check| check.state == CheckState::Failed);
    match (&backend.why, broken) {
        (Some(why), _) => format!(": {why}"),
        (None, Some(check)) => format!(": {}: {}", check.name, check.found),
        (None, None) => String::new(),
    }
}

/// A line of the report.
struct Row {
    state: CheckState,
    name: String,
    text: String,
}

impl Row {
    fn of(check: &Check) -> Row {
        let text = paragraphs(
            [Some(&check.found), check.why.as_ref()],
            check.remedy.as_ref(),
        );
        Row {
            state: check.state,
            name: check.name.clone(),
            text,
        }
    }

    fn of_backend(backend: &Backend) -> Row {
        let devices = match backend.devices.len() {
            0 => "no device".to_owned(),
            1 => "1 device".to_owned(),
            count => format!("{count} devices"),
        };
        let text = paragraphs(
            [Some(&devices), backend.why.as_ref()],
            backend.remedy.as_ref(),
        );
        Row {
            state: backend.state,
            name: "devices".into(),
            text,
        }
    }

    fn of_device(device: &Device) -> Row {
        let free = device.free_bytes.map_or_else(
            || "free unknown".into(),
            |free| format!("{} free", size::show(free)),
        );
        let text = format!(
            "{}, {}, {free}\n{}",
            device.name,
            size::show(device.total_bytes),
            device.uuid
        );
        Row {
            state: if device.works {
                CheckState::Ok
            } else {
                CheckState::Failed
            },
            name: "device".into(),
            text,
        }
    }
}

fn paragraphs(what: [Option<&String>; 2], remedy: Option<&String>) -> String {
    let what = what.into_iter().flatten().cloned();
    what.chain(remedy.map(|remedy| format!("→ {remedy}")))
        .collect::<Vec<_>>()
        .join("\n")
}

fn section(title: &str, rows: Vec<Row>, columns: u16) -> String {
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(columns);
    for row in rows {
        table.add_row([row.state.mark(), &row.name, &row.text]);
    }
    let width = |columns| ColumnConstraint::Absolute(Width::Fixed(columns));
    table.set_constraints([
        width(MARK),
        width(NAME),
        width(columns.saturating_sub(MARK + NAME)),
    ]);
    format!("{title}\n{}", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::backend::Caps;

    fn backend(kind: BackendKind, works: bool) -> Backend {
        let caps = Caps {
            handle: true,
            fd: true,
            read_only: true,
            event_ipc: true,
            stream_writes: true,
            stream_waits: true,
            ranges: true,
            shared_context: false,
            granularity: 1,
        };
        let device = Device {
            number: 0,
            uuid: "u".into(),
            name: "n".into(),
            total_bytes: 1,
            free_bytes: None,
            caps,
            works,
            checks: vec![if works {
                Check::ok("x", "y")
            } else {
                Check::failed("x", "broken").remedy("mend it")
            }],
        };
        let state = if works {
            CheckState::Ok
        } else {
            CheckState::Failed
        };
        Backend {
            state,
            devices: vec![device],
            ..Backend::new(kind)
        }
    }

    #[test]
    fn what_is_required_decides() {
        let judge = |required: &[BackendKind], kernel: Vec<Check>, backends: Vec<Backend>| {
            Report::new(required, kernel, Vec::new(), backends)
        };
        let (host, cuda) = (BackendKind::Host, BackendKind::Cuda);
        assert!(
            judge(
                &[],
                Vec::new(),
                vec![backend(host, true), backend(cuda, false)]
            )
            .ok
        );
        assert!(
            judge(
                &[host],
                Vec::new(),
                vec![backend(host, true), backend(cuda, false)]
            )
            .ok
        );
        let broken = judge(
            &[cuda],
            Vec::new(),
            vec![backend(host, true), backend(cuda, false)],
        );
        assert_eq!(
            broken.failed,
            ["cuda is required and has no working device: x: broken"]
        );
        let missing = Backend {
            why: Some("no driver".into()),
            ..Backend::new(cuda)
        };
        let missing = judge(&[cuda], Vec::new(), vec![backend(host, true), missing]);
        assert_eq!(
            missing.failed,
            ["cuda is required and has no working device: no driver"]
        );
        assert!(
            !judge(&[], Vec::new(), Vec::new()).ok,
            "nothing works at all"
        );
        let kernel = vec![Check::failed("pidfd_open", "not there").needed()];
        assert_eq!(
            judge(&[], kernel, vec![backend(host, true)]).failed,
            ["pidfd_open: not there"]
        );
        assert!(
            judge(
                &[],
                vec![Check::failed("x", "y")],
                vec![backend(host, true)]
            )
            .ok,
            "not needed"
        );
    }

    #[test]
    fn every_reason_and_remedy_is_read_within_the_columns() {
        let long =
            "a reason that goes on and on and must be broken into several lines to be read at all"
                .to_owned();
        let check = Check::warning("a name", "found").why(long).remedy("do it");
        let report = Report::new(
            &[],
            vec![check],
            Vec::new(),
            vec![backend(BackendKind::Cuda, false)],
        );
        for columns in [None, Some(0), Some(70), Some(400)] {
            let text = report.text(columns);
            let most = columns.unwrap_or(80).clamp(60, 110);
            for line in text.lines().filter(|line| !line.starts_with("FAIL")) {
                assert!(line.chars().count() <= usize::from(most), "{line}");
            }
            for part in ["warn", "a name", "→ do it", "→ mend it", "FAIL"] {
                assert!(text.contains(part), "{part} is missing: {text}");
            }
            assert!(!text.contains('\u{1b}'));
        }
    }

    /// What docs/TOOLS.md promises to programs.
    #[test]
    fn the_shape_is_this() {
        let report = Report::new(
            &[],
            vec![Check::ok("x", "y")],
            Vec::new(),
            vec![backend(BackendKind::Host, true)],
        );
        let value: serde_json::Value = serde_json::from_str(&report.json()).expect("JSON");
        let keys = |value: &serde_json::Value| -> Vec<String> {
            let mut keys: Vec<String> = value
                .as_object()
                .expect("an object")
                .keys()
                .cloned()
                .collect();
            keys.sort();
            keys
        };
        assert_eq!(
            keys(&value),
            [
                "backends", "failed", "kernel", "limits", "ok", "program", "required", "shape"
            ]
        );
        assert_eq!(value["shape"], 1);
        assert_eq!(
            keys(&value["kernel"][0]),
            ["found", "name", "needed", "remedy", "state", "why"]
        );
        assert_eq!(value["kernel"][0]["state"], "ok");
        let backend = &value["backends"][0];
        assert_eq!(
            keys(backend),
            ["backend", "checks", "devices", "remedy", "state", "why"]
        );
        let device = &backend["devices"][0];
        assert_eq!(
            keys(device),
            [
                "caps",
                "checks",
                "free_bytes",
                "name",
                "number",
                "total_bytes",
                "uuid",
                "works"
            ]
        );
        assert_eq!(
            keys(&device["caps"]),
            [
                "event_ipc",
                "fd",
                "granularity",
                "handle",
                "ranges",
                "read_only",
                "shared_context",
                "stream_waits",
                "stream_writes"
            ]
        );
    }
}
