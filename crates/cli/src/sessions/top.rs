//! `gpu-ipc top`: the sessions, live.

use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

use crossterm::cursor::{Hide, MoveTo, MoveToNextLine, Show};
use crossterm::style::{Attribute, Print, SetAttribute};
use crossterm::terminal::{self, Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{execute, queue};

use super::brokers::{BrokerState, Depth, SeenBroker, look, summary};
use super::columns::{Column, HOLDER_COLUMNS, Shown, digits, holder_cells, words};
use super::gather::{Answer, Seen, gather};
use super::keys::{Key, Keyboard};
use super::text::{bytes, cut, fitting, time, wrapped};
use crate::args::TopOptions;
use crate::{Outcome, output};

const SESSION_COLUMNS: [Column; 9] = [
    digits("PID", 8, 0),
    words("COMMAND", 15, 1),
    words("ON", 4, 7),
    digits("BLOCKS", 7, 6),
    digits("BYTES", 9, 2),
    digits("LIMBO", 9, 4),
    digits("HELD", 7, 3),
    digits("PEERS", 5, 5),
    digits("OPEN FOR", 8, 8),
];

/// Shows the sessions until the user has seen enough.
pub fn run(options: &TopOptions) -> Outcome {
    if !stdout().is_terminal() {
        let why = "top needs a terminal, and standard output is not one; for a pipe or a file use gpu-ipc ls";
        return output::fail(why, false, Outcome::Unavailable);
    }
    if std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
        let why =
            "top moves the cursor, and TERM says that this terminal cannot (dumb); use gpu-ipc ls";
        return output::fail(why, false, Outcome::Unavailable);
    }
    let keyboard = match Keyboard::open() {
        Ok(keyboard) => keyboard,
        Err(error) => {
            let why = format!("the keyboard cannot be read: {error}; use gpu-ipc ls");
            return output::fail(&why, false, Outcome::Unavailable);
        }
    };
    let screen = match Screen::take() {
        Ok(screen) => screen,
        Err(error) => {
            let why = format!("the terminal cannot be drawn on: {error}; use gpu-ipc ls");
            return output::fail(&why, false, Outcome::Unavailable);
        }
    };
    let ended = watch(options, &keyboard);
    drop(screen);
    match ended {
        Ok(()) => Outcome::Good,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

/// The terminal, with a screen of its own and each key at once. As it was before when dropped.
struct Screen;

impl Screen {
    fn take() -> std::io::Result<Screen> {
        terminal::enable_raw_mode()?;
        let screen = Screen;
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // What cannot be put back stays as it is: nobody is left to tell.
        let _ = execute!(stdout(), Show, LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

fn watch(options: &TopOptions, keyboard: &Keyboard) -> Result<(), String> {
    let interval = Duration::from_secs_f64(options.interval);
    let mut view = View::default();
    loop {
        if !view.paused {
            view.take(gather(&options.place)?);
            view.broker = if options.place.sessions.is_empty() {
                look(
                    None,
                    Depth::Objects,
                    Duration::from_secs_f64(options.place.timeout),
                )
            } else {
                None
            };
        }
        let due = Instant::now() + interval;
        loop {
            view.draw()
                .map_err(|e| format!("the terminal cannot be drawn on: {e}"))?;
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let keys = keyboard
                .wait(left)
                .map_err(|e| format!("the keyboard cannot be read: {e}"))?;
            if keys.into_iter().any(|key| view.obey(key) == Wish::Quit) {
                return Ok(());
            }
        }
    }
}

/// What a key asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wish {
    Stay,
    Quit,
}

/// A line of the screen.
struct Line {
    text: String,
    looks: Attribute,
}

impl Line {
    fn plain(text: impl Into<String>) -> Line {
        Line {
            text: text.into(),
            looks: Attribute::Reset,
        }
    }
}

/// What is on the screen.
#[derive(Default)]
struct View {
    seen: Vec<Seen>,
    selected: usize,
    paused: bool,
    broker: Option<SeenBroker>,
}

impl View {
    fn take(&mut self, seen: Vec<Seen>) {
        // The selection stays with its session, wherever that is in the new list.
        let socket = self.seen.get(self.selected).map(|one| one.socket.clone());
        self.seen = seen;
        let place = self
            .seen
            .iter()
            .position(|one| Some(&one.socket) == socket.as_ref());
        self.selected = place
            .unwrap_or(self.selected)
            .min(self.seen.len().saturating_sub(1));
    }

    fn obey(&mut self, key: Key) -> Wish {
        match key {
            Key::Quit => return Wish::Quit,
            Key::Down if self.selected + 1 < self.seen.len() => self.selected += 1,
            Key::Down => {}
            Key::Up => self.selected = self.selected.saturating_sub(1),
            Key::Pause => self.paused = !self.paused,
        }
        Wish::Stay
    }

    fn draw(&self) -> std::io::Result<()> {
        let (width, height) = terminal::size()?;
        let mut out = stdout().lock();
        queue!(out, MoveTo(0, 0))?;
        for (number, line) in self
            .lines(width.into(), height.into())
            .into_iter()
            .enumerate()
        {
            if number > 0 {
                queue!(out, MoveToNextLine(1))?;
            }
            // Cleared before: after a text that fills the line the cursor still stands on its last
            // letter.
            queue!(
                out,
                Clear(ClearType::UntilNewLine),
                SetAttribute(line.looks)
            )?;
            queue!(out, Print(line.text), SetAttribute(Attribute::Reset))?;
        }
        out.flush()
    }

    /// Returns as many lines as the screen has, none wider than it.
    fn lines(&self, width: usize, height: usize) -> Vec<Line> {
        let mut lines = vec![Line {
            text: self.title(width),
            looks: Attribute::Bold,
        }];
        lines.extend(self.list(width, (height.max(8) / 2 - 2).min(self.seen.len())));
        let mut last = Vec::new();
        if let Some(seen) = &self.broker {
            let text = match &seen.state {
                BrokerState::Serves(listing) => format!("BROKER {}", summary(listing)),
                BrokerState::Hung(pid) => {
                    format!("BROKER process {pid} does not answer: it hangs or is stopped")
                }
                BrokerState::Unknown(why) => format!("BROKER {why}"),
            };
            last.push(Line::plain(text));
        }
        let keys = ["PAUSED", "q quit", "p pause", "↑↓ choose a session"].map(String::from);
        last.push(Line::plain(fitting(
            &keys[usize::from(!self.paused)..],
            width,
        )));
        let middle = height.saturating_sub(last.len());
        lines.extend(self.detail(width));
        lines.resize_with(middle, || Line::plain(""));
        lines.extend(last);
        lines.truncate(height);
        for line in &mut lines {
            line.text = cut(&line.text, width);
        }
        lines
    }

    fn title(&self, width: usize) -> String {
        let alive = self.seen.iter().filter_map(|one| match &one.answer {
            Answer::Alive(report) => Some(&report.stats),
            _ => None,
        });
        let (mut blocks, mut held, mut limbo) = (0, 0, 0);
        for stats in alive {
            blocks += stats.live_bytes;
            held += stats.held;
            limbo += stats.limbo_bytes;
        }
        let sessions = self.seen.len();
        let noun = if sessions == 1 { "session" } else { "sessions" };
        let parts = [
            format!("{sessions} {noun}"),
            format!("{} shared", bytes(blocks)),
            format!("{held} leases held"),
            format!("{} in limbo", bytes(limbo)),
            "gpu-ipc".into(),
        ];
        fitting(&parts, width)
    }

    /// Returns the sessions' table with at most `most` of them, the chosen one among these.
    fn list(&self, width: usize, most: usize) -> Vec<Line> {
        let shown = Shown::within(width, &SESSION_COLUMNS);
        let first = (self.selected + 1).saturating_sub(most);
        let row = |(index, one): (usize, &Seen)| {
            let looks = if index == self.selected {
                Attribute::Bold
            } else {
                Attribute::Reset
            };
            match &one.answer {
                Answer::Alive(report) => {
                    let stats = &report.stats;
                    let text = shown.line([
                        report.pid.to_string(),
                        cut(&report.command, 15),
                        report.backend.to_string(),
                        stats.live_blocks.to_string(),
                        bytes(stats.live_bytes),
                        bytes(stats.limbo_bytes),
                        stats.held.to_string(),
                        stats.participants.to_string(),
                        time(report.age),
                    ]);
                    Line { text, looks }
                }
                Answer::Hung(Some(listener)) => {
                    let text = shown.line([
                        listener.pid.to_string(),
                        format!("HUNG {}", cut(&listener.command, 10)),
                    ]);
                    Line {
                        text,
                        looks: Attribute::Reverse,
                    }
                }
                Answer::Hung(None) | Answer::Unknown(_) => {
                    let what = if matches!(one.answer, Answer::Hung(_)) {
                        "HUNG"
                    } else {
                        "UNKNOWN"
                    };
                    let text =
                        shown.line([what.to_owned(), cut(&one.socket.display().to_string(), 15)]);
                    Line {
                        text,
                        looks: Attribute::Reverse,
                    }
                }
            }
        };
        let rows = self.seen.iter().enumerate().skip(first).take(most).map(row);
        [Line {
            text: shown.head(),
            looks: Attribute::Underlined,
        }]
        .into_iter()
        .chain(rows)
        .collect()
    }

    /// Returns what is known of the chosen session.
    fn detail(&self, width: usize) -> Vec<Line> {
        let say = |text: &str| -> Vec<Line> {
            wrapped(text, width).into_iter().map(Line::plain).collect()
        };
        let Some(one) = self.seen.get(self.selected) else {
            return say(
                "No session is open here. One that listens on a path of its own: gpu-ipc top PATH",
            );
        };
        let heading = format!(
            "── {} ",
            cut(&one.socket.display().to_string(), width.saturating_sub(4))
        );
        let mut lines = vec![Line::plain(format!("{heading:─<width$}"))];
        let report = match &one.answer {
            Answer::Alive(report) => report,
            Answer::Hung(listener) => {
                let who = listener
                    .as_ref()
                    .map_or("Its process".into(), |of| format!("Process {}", of.pid));
                lines.extend(say(&format!(
                    "{who} listens and does not answer: it hangs or is stopped."
                )));
                return lines;
            }
            Answer::Unknown(why) => {
                lines.extend(say(why));
                return lines;
            }
        };
        let shown = Shown::within(width, &HOLDER_COLUMNS);
        lines.push(Line {
            text: shown.head(),
            looks: Attribute::Underlined,
        });
        lines.extend(
            holder_cells(&report.stats.holders)
                .into_iter()
                .map(|cells| Line::plain(shown.line(cells))),
        );
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather::Listener;
    use super::*;

    fn drawn(view: &View) -> String {
        drawn_within(80, view)
    }

    fn drawn_within(columns: usize, view: &View) -> String {
        let texts: Vec<String> = view
            .lines(columns, 24)
            .into_iter()
            .map(|line| line.text)
            .collect();
        texts.join("\n")
    }

    fn hung(socket: &str) -> Seen {
        Seen {
            socket: socket.into(),
            answer: Answer::Hung(Some(Listener {
                pid: 4321,
                command: "engine".into(),
            })),
        }
    }

    #[test]
    fn an_empty_host_says_where_else_to_look() {
        let text = drawn(&View::default());
        assert!(
            text.contains("0 sessions") && text.contains("gpu-ipc top PATH"),
            "{text}"
        );
    }

    #[test]
    fn a_session_and_its_holders_fit_80_columns() {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default())
            .expect("it opens");
        let gpu = gpu_ipc::Gpu::new(backend, gpu_ipc::backend::DeviceId(0)).expect("a device");
        let session = gpu_ipc::Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let participant = gpu_ipc::Participant::builder(gpu)
            .connect(session.socket_path())
            .expect("connected");
        let block = session.alloc(1 << 20).expect("there is room");
        let to = gpu_ipc::To::Participant(participant.id());
        let descriptor = block.share(to, gpu_ipc::After::Done).expect("shared");
        let held = participant
            .claim(descriptor.as_bytes(), gpu_ipc::Wait::None, None)
            .expect("claimed");
        let report = gpu_ipc::admin::inspect(session.socket_path(), None).expect("a report");
        let alive = Seen {
            socket: session.socket_path().into(),
            answer: Answer::Alive(Box::new(report)),
        };
        let mut view = View::default();
        view.take(vec![alive, hung("/run/other.sock")]);
        let text = drawn(&view);
        let own = std::process::id().to_string();
        for word in [
            "2 sessions",
            "1 leases held",
            "HELD BY",
            "1.00 MiB",
            "alive",
            "HUNG engine",
            "4321",
            "OPEN FOR",
            "host",
            &own,
        ] {
            assert!(text.contains(word), "no {word:?} in\n{text}");
        }
        assert_eq!(
            text.matches(&own).count(),
            2,
            "the producer and the holder, uncut:\n{text}"
        );
        for width in [60, 80] {
            let listed = crate::sessions::ls::table(&view.seen, width);
            let fits = |line: &str| line.chars().count() <= width.into() || line.contains(" /");
            assert!(listed.lines().all(fits), "{listed}");
            assert!(
                listed.contains("1.00 MiB") && listed.contains("process 4321 (engine) listens"),
                "{listed}"
            );
        }
        drop(held);
    }

    #[test]
    fn a_broker_has_a_line() {
        let state = BrokerState::Serves(Box::new(crate::sessions::brokers::tests::listing()));
        let mut view = View {
            broker: Some(SeenBroker {
                dir: "/run/objects".into(),
                state,
            }),
            ..View::default()
        };
        let text = drawn(&view);
        assert!(
            text.contains("BROKER process 4194304, 2 objects of 10.0 GiB, keeper has all"),
            "{text}"
        );
        view.broker = Some(SeenBroker {
            dir: "/run/objects".into(),
            state: BrokerState::Hung(12),
        });
        assert!(drawn(&view).contains("BROKER process 12 does not answer"));
    }

    #[test]
    fn a_narrow_terminal_leaves_columns_out_and_cuts_no_number() {
        let view = View {
            seen: vec![hung("/run/other.sock")],
            ..View::default()
        };
        let heads = |columns| {
            drawn_within(columns, &view)
                .lines()
                .nth(1)
                .expect("a header")
                .to_owned()
        };
        assert_eq!(
            heads(40).split_whitespace().collect::<Vec<_>>(),
            ["PID", "COMMAND", "BYTES"]
        );
        assert!(heads(80).contains("OPEN FOR"), "{}", heads(80));
        let title = drawn_within(20, &view)
            .lines()
            .next()
            .expect("a title")
            .to_owned();
        assert_eq!(title, "1 session", "parts are left out, and none is cut");
    }

    #[test]
    fn the_screen_is_filled_and_never_overrun() {
        let many: Vec<Seen> = (0..30)
            .map(|number| hung(&format!("/run/{number}.sock")))
            .collect();
        let view = View {
            seen: many,
            selected: 29,
            ..View::default()
        };
        for (columns, rows) in
            (1..=100).flat_map(|columns| (0..=40).map(move |rows| (columns, rows)))
        {
            let lines = view.lines(columns, rows);
            assert_eq!(lines.len(), rows, "{columns} x {rows}");
            assert!(
                lines
                    .iter()
                    .all(|line| line.text.chars().count() <= columns),
                "{columns} x {rows}"
            );
        }
        let text = drawn(&view);
        assert!(
            text.contains("/run/29.sock") && text.ends_with("choose a session"),
            "{text}"
        );
        let listed = text.lines().filter(|line| line.contains("HUNG")).count();
        assert_eq!(
            listed, 10,
            "half of the screen is the chosen session's:\n{text}"
        );
    }

    #[test]
    fn the_selection_stays_with_its_session() {
        let mut view = View::default();
        view.take(vec![hung("/a"), hung("/b"), hung("/c")]);
        assert_eq!(view.obey(Key::Down), Wish::Stay);
        view.take(vec![hung("/b"), hung("/c")]);
        assert_eq!(view.selected, 0);
        assert!(drawn(&view).contains("does not answer"));
        view.take(Vec::new());
        assert_eq!(
            (view.selected, view.obey(Key::Down), view.selected),
            (0, Wish::Stay, 0)
        );
        assert_eq!(view.obey(Key::Quit), Wish::Quit);
    }
}
