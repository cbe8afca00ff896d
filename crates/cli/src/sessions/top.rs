//! `gpu-ipc top`: the sessions, live.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, TableState, Wrap};

use super::brokers::{BrokerState, SeenBroker, look, summary};
use super::columns::{Column, HOLDER_COLUMNS, Shown, digits, number, words};
use super::gather::{Answer, Seen, gather};
use super::text::{bytes, cut, fitting, time};
use crate::args::TopOptions;
use lab::{Outcome, output};

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
    if !std::io::stdout().is_terminal() {
        let why = "top needs a terminal, and standard output is not one; for a pipe or a file use gpu-ipc ls";
        return output::fail(why, false, Outcome::Unavailable);
    }
    if std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
        let why = "top moves the cursor, and TERM says that this terminal cannot (dumb); use gpu-ipc ls";
        return output::fail(why, false, Outcome::Unavailable);
    }
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => {
            let why = format!("the terminal cannot be drawn on: {error}; use gpu-ipc ls");
            return output::fail(&why, false, Outcome::Unavailable);
        }
    };
    let ended = watch(options, &mut terminal);
    ratatui::restore();
    match ended {
        Ok(()) => Outcome::Good,
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn watch(options: &TopOptions, terminal: &mut ratatui::DefaultTerminal) -> Result<(), String> {
    let interval = Duration::from_secs_f64(options.interval);
    let mut view = View::default();
    loop {
        if !view.paused {
            view.take(gather(&options.place)?);
            view.broker = if options.place.sessions.is_empty() {
                look(Duration::from_secs_f64(options.place.timeout))
            } else {
                None
            };
        }
        let due = Instant::now() + interval;
        loop {
            terminal.draw(|frame| view.draw(frame)).map_err(|e| format!("the terminal cannot be drawn on: {e}"))?;
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() || !event::poll(left).map_err(|e| format!("the keyboard cannot be read: {e}"))? {
                break;
            }
            let event = event::read().map_err(|e| format!("the keyboard cannot be read: {e}"))?;
            if let Event::Key(key) = event
                && key.kind == KeyEventKind::Press
            {
                let interrupt = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
                if interrupt || view.obey(key.code) == Wish::Quit {
                    return Ok(());
                }
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
        let place = self.seen.iter().position(|one| Some(&one.socket) == socket.as_ref());
        self.selected = place.unwrap_or(self.selected).min(self.seen.len().saturating_sub(1));
    }

    fn obey(&mut self, key: KeyCode) -> Wish {
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Quit,
            KeyCode::Down | KeyCode::Char('j') if self.selected + 1 < self.seen.len() => self.selected += 1,
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Char('p') | KeyCode::Char(' ') => self.paused = !self.paused,
            _ => {}
        }
        Wish::Stay
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let sessions = (self.seen.len() as u16).clamp(1, frame.area().height.max(8) / 2 - 2) + 1;
        let areas = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(sessions),
            Constraint::Min(3),
            Constraint::Length(u16::from(self.broker.is_some())),
            Constraint::Length(1),
        ]);
        let [title, list, detail, broker, keys] = areas.areas(frame.area());
        frame.render_widget(Line::styled(self.title(title.width), Style::new().add_modifier(Modifier::BOLD)), title);
        let mut state = TableState::new().with_selected((!self.seen.is_empty()).then_some(self.selected));
        frame.render_stateful_widget(self.list(list.width), list, &mut state);
        self.draw_detail(frame, detail);
        if let Some(seen) = &self.broker {
            let text = match &seen.state {
                BrokerState::Serves(listing) => format!("BROKER {}", summary(listing)),
                BrokerState::Hung(pid) => format!("BROKER process {pid} does not answer: it hangs or is stopped"),
                BrokerState::Unknown(why) => format!("BROKER {why}"),
            };
            frame.render_widget(Line::raw(cut(&text, broker.width.into())), broker);
        }
        let mut parts = vec!["q quit", "p pause", "↑↓ choose a session"];
        if self.paused {
            parts.insert(0, "PAUSED");
        }
        let parts: Vec<String> = parts.into_iter().map(String::from).collect();
        frame.render_widget(Line::raw(fitting(&parts, keys.width.into())), keys);
    }

    fn title(&self, width: u16) -> String {
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
        fitting(&parts, width.into())
    }

    fn list(&self, width: u16) -> Table<'static> {
        let shown = Shown::within(width, &SESSION_COLUMNS);
        let rows = self.seen.iter().map(|one| match &one.answer {
            Answer::Alive(report) => {
                let stats = &report.stats;
                shown.row([
                    number(report.pid),
                    Cell::from(cut(&report.command, 15)),
                    Cell::from(report.backend.to_string()),
                    number(stats.live_blocks),
                    number(bytes(stats.live_bytes)),
                    number(bytes(stats.limbo_bytes)),
                    number(stats.held),
                    number(stats.participants),
                    number(time(report.age)),
                ])
            }
            Answer::Hung(Some(listener)) => {
                Row::new([number(listener.pid), Cell::from(format!("HUNG {}", cut(&listener.command, 10)))])
                    .style(Style::new().add_modifier(Modifier::REVERSED))
            }
            Answer::Hung(None) | Answer::Unknown(_) => {
                let what = if matches!(one.answer, Answer::Hung(_)) { "HUNG" } else { "UNKNOWN" };
                Row::new([what.to_owned(), cut(&one.socket.display().to_string(), 15)])
                    .style(Style::new().add_modifier(Modifier::REVERSED))
            }
        });
        shown.table(rows).row_highlight_style(Style::new().add_modifier(Modifier::BOLD)).highlight_symbol("")
    }

    fn draw_detail(&self, frame: &mut Frame<'_>, area: ratatui::layout::Rect) {
        let Some(one) = self.seen.get(self.selected) else {
            let text = "No session is open here. One that listens on a path of its own:\ngpu-ipc top PATH";
            frame.render_widget(Paragraph::new(text), area);
            return;
        };
        let title = format!(" {} ", cut(&one.socket.display().to_string(), usize::from(area.width).saturating_sub(4)));
        let block = Block::bordered().title(title);
        let report = match &one.answer {
            Answer::Alive(report) => report,
            Answer::Hung(listener) => {
                let who = listener.as_ref().map_or("Its process".into(), |of| format!("Process {}", of.pid));
                let text = format!("{who} listens and does not answer: it hangs or is stopped.");
                frame.render_widget(Paragraph::new(text).wrap(Wrap::default()).block(block), area);
                return;
            }
            Answer::Unknown(why) => {
                frame.render_widget(Paragraph::new(why.as_str()).wrap(Wrap::default()).block(block), area);
                return;
            }
        };
        let mut holders: Vec<_> = report.stats.holders.iter().collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let shown = Shown::within(block.inner(area).width, &HOLDER_COLUMNS);
        let rows = holders.into_iter().map(|holder| {
            shown.row([
                number(holder.pid),
                Cell::from(cut(&holder.command, 15)),
                number(holder.leases),
                number(bytes(holder.bytes)),
                number(holder.mappings),
                number(if holder.leases == 0 { "-".into() } else { time(holder.oldest) }),
                Cell::from(if holder.dying { "dying" } else { "alive" }),
            ])
        });
        frame.render_widget(shown.table(rows).block(block), area);
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather::Listener;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(view: &View) -> String {
        drawn_within(80, view)
    }

    fn drawn_within(columns: u16, view: &View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, 24)).expect("a terminal");
        terminal.draw(|frame| view.draw(frame)).expect("drawn");
        terminal.backend().to_string()
    }

    fn hung(socket: &str) -> Seen {
        Seen { socket: socket.into(), answer: Answer::Hung(Some(Listener { pid: 4321, command: "engine".into() })) }
    }

    #[test]
    fn an_empty_host_says_where_else_to_look() {
        let text = drawn(&View::default());
        assert!(text.contains("0 sessions") && text.contains("gpu-ipc top PATH"), "{text}");
    }

    #[test]
    fn a_session_and_its_holders_fit_80_columns() {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default()).expect("it opens");
        let gpu = gpu_ipc::Gpu::new(backend, gpu_ipc::backend::DeviceId(0)).expect("a device");
        let session = gpu_ipc::Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
        let participant = gpu_ipc::Participant::builder(gpu).connect(session.socket_path()).expect("connected");
        let block = session.alloc(1 << 20).expect("there is room");
        let to = gpu_ipc::To::Participant(participant.id());
        let descriptor = block.share(to, gpu_ipc::After::Done).expect("shared");
        let held = participant.claim(descriptor.as_bytes(), gpu_ipc::Wait::None, None).expect("claimed");
        let report = gpu_ipc::admin::inspect(session.socket_path(), None).expect("a report");
        let alive = Seen { socket: session.socket_path().into(), answer: Answer::Alive(Box::new(report)) };
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
        assert_eq!(text.matches(&own).count(), 2, "the producer and the holder, uncut:\n{text}");
        for width in [60, 80] {
            let listed = crate::sessions::ls::table(&view.seen, width);
            let fits = |line: &str| line.chars().count() <= width.into() || line.contains(" /");
            assert!(listed.lines().all(fits), "{listed}");
            assert!(listed.contains("1.00 MiB") && listed.contains("process 4321 (engine) listens"), "{listed}");
        }
        drop(held);
    }

    #[test]
    fn a_broker_has_a_line() {
        let state = BrokerState::Serves(Box::new(crate::sessions::brokers::tests::listing()));
        let mut view = View { broker: Some(SeenBroker { dir: "/run/objects".into(), state }), ..View::default() };
        let text = drawn(&view);
        assert!(text.contains("BROKER process 4194304, 2 objects of 10.0 GiB, keeper has all"), "{text}");
        view.broker = Some(SeenBroker { dir: "/run/objects".into(), state: BrokerState::Hung(12) });
        assert!(drawn(&view).contains("BROKER process 12 does not answer"));
    }

    #[test]
    fn a_narrow_terminal_leaves_columns_out_and_cuts_no_number() {
        let view = View { seen: vec![hung("/run/other.sock")], ..View::default() };
        let heads = |columns| drawn_within(columns, &view).lines().nth(1).expect("a header").to_owned();
        assert_eq!(
            heads(40).trim_matches(['"', ' ']).split_whitespace().collect::<Vec<_>>(),
            ["PID", "COMMAND", "BYTES"]
        );
        assert!(heads(80).contains("OPEN FOR"), "{}", heads(80));
        let title = drawn_within(20, &view).lines().next().expect("a title").to_owned();
        assert_eq!(title.trim_matches(['"', ' ']), "1 session", "parts are left out, and none is cut");
        for columns in 1..=100 {
            drawn_within(columns, &view);
        }
    }

    #[test]
    fn the_selection_stays_with_its_session() {
        let mut view = View::default();
        view.take(vec![hung("/a"), hung("/b"), hung("/c")]);
        assert_eq!(view.obey(KeyCode::Down), Wish::Stay);
        view.take(vec![hung("/b"), hung("/c")]);
        assert_eq!(view.selected, 0);
        assert!(drawn(&view).contains("does not answer"));
        view.take(Vec::new());
        assert_eq!((view.selected, view.obey(KeyCode::Down), view.selected), (0, Wish::Stay, 0));
        assert_eq!(view.obey(KeyCode::Char('q')), Wish::Quit);
    }
}
