//! `gpu-ipc top`: the sessions, live.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, TableState};

use super::gather::{Seen, State, gather};
use super::text::{bytes, cut, time};
use crate::args::TopOptions;
use crate::{Outcome, output};

/// Shows the sessions until the user has seen enough.
pub fn run(options: &TopOptions) -> Outcome {
    if !std::io::stdout().is_terminal() {
        let why = "top draws on a terminal, and standard output is none; for a pipe or a file: gpu-ipc ls";
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
            Constraint::Length(1),
        ]);
        let [title, list, detail, keys] = areas.areas(frame.area());
        frame.render_widget(Line::styled(self.title(), Style::new().add_modifier(Modifier::BOLD)), title);
        let mut state = TableState::new().with_selected((!self.seen.is_empty()).then_some(self.selected));
        frame.render_stateful_widget(self.list(), list, &mut state);
        self.draw_detail(frame, detail);
        let paused = if self.paused { "  PAUSED" } else { "" };
        frame.render_widget(Line::raw(format!("↑↓ choose a session   p pause   q quit{paused}")), keys);
    }

    fn title(&self) -> String {
        let alive = self.seen.iter().filter_map(|one| match &one.state {
            State::Alive(report) => Some(&report.stats),
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
        format!(
            "gpu-ipc   {sessions} {noun}   {} shared   {held} leases held   {} in limbo",
            bytes(blocks),
            bytes(limbo)
        )
    }

    fn list(&self) -> Table<'_> {
        let rows = self.seen.iter().map(|one| match &one.state {
            State::Alive(report) => {
                let stats = &report.stats;
                Row::new([
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
            State::Hung | State::Unknown(_) => {
                let what = if matches!(one.state, State::Hung) { "HUNG" } else { "UNKNOWN" };
                Row::new([what.to_owned(), cut(&one.socket.display().to_string(), 15)])
                    .style(Style::new().add_modifier(Modifier::REVERSED))
            }
        });
        let widths = [8, 15, 4, 7, 9, 9, 7, 5, 8].map(Constraint::Length);
        let header = ["BLOCKS", "BYTES", "LIMBO", "HELD", "PEERS", "OPEN FOR"].map(number);
        let header = [number("PID"), Cell::from("COMMAND"), Cell::from("ON")].into_iter().chain(header);
        Table::new(rows, widths)
            .header(Row::new(header).style(Style::new().add_modifier(Modifier::UNDERLINED)))
            .row_highlight_style(Style::new().add_modifier(Modifier::BOLD))
            .highlight_symbol("")
    }

    fn draw_detail(&self, frame: &mut Frame<'_>, area: ratatui::layout::Rect) {
        let Some(one) = self.seen.get(self.selected) else {
            let text = "No session is open here. One that listens on a path of its own:\ngpu-ipc top --socket PATH";
            frame.render_widget(Paragraph::new(text), area);
            return;
        };
        let title = format!(" {} ", cut(&one.socket.display().to_string(), 70));
        let block = Block::bordered().title(title);
        let report = match &one.state {
            State::Alive(report) => report,
            State::Hung => {
                let text = "It listens and does not answer: its process hangs or is stopped.";
                frame.render_widget(Paragraph::new(text).block(block), area);
                return;
            }
            State::Unknown(why) => {
                frame.render_widget(Paragraph::new(why.as_str()).block(block), area);
                return;
            }
        };
        let mut holders: Vec<_> = report.stats.holders.iter().collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let rows = holders.into_iter().map(|holder| {
            Row::new([
                number(holder.pid),
                Cell::from(cut(&holder.command, 15)),
                number(holder.leases),
                number(bytes(holder.bytes)),
                number(holder.mappings),
                number(if holder.leases == 0 { "-".into() } else { time(holder.oldest) }),
                Cell::from(if holder.dying { "dying" } else { "alive" }),
            ])
        });
        let widths = [8, 15, 9, 10, 8, 10, 7].map(Constraint::Length);
        let numbers = ["LEASES", "BYTES", "REGIONS", "OLDEST"].map(number);
        let header = [number("PID"), Cell::from("HELD BY")].into_iter().chain(numbers).chain([Cell::from("STATE")]);
        let header = Row::new(header).style(Style::new().add_modifier(Modifier::UNDERLINED));
        frame.render_widget(Table::new(rows, widths).header(header).block(block), area);
    }
}

/// A cell whose digits stand below each other.
fn number(value: impl ToString) -> Cell<'static> {
    Cell::from(Text::from(value.to_string()).right_aligned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(view: &View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a terminal");
        terminal.draw(|frame| view.draw(frame)).expect("drawn");
        terminal.backend().to_string()
    }

    fn hung(socket: &str) -> Seen {
        Seen { socket: socket.into(), state: State::Hung }
    }

    #[test]
    fn an_empty_host_says_where_else_to_look() {
        let text = drawn(&View::default());
        assert!(text.contains("0 sessions") && text.contains("--socket PATH"), "{text}");
    }

    #[test]
    fn a_session_and_its_holders_fit_80_columns() {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default()).expect("it opens");
        let gpu = gpu_ipc::Gpu::new(backend, gpu_ipc::DeviceId(0)).expect("a device");
        let session = gpu_ipc::Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
        let participant = gpu_ipc::Participant::builder(gpu).connect(session.socket_path()).expect("connected");
        let block = session.alloc(1 << 20).expect("there is room");
        let to = gpu_ipc::To::Participant(participant.id());
        let descriptor = block.share(to, gpu_ipc::After::Done).expect("shared");
        let held = participant.claim(descriptor.as_bytes(), gpu_ipc::Wait::None, None).expect("claimed");
        let report = gpu_ipc::inspect(session.socket_path(), None).expect("a report");
        let alive = Seen { socket: session.socket_path().into(), state: State::Alive(Box::new(report)) };
        let mut view = View::default();
        view.take(vec![alive, hung("/run/other.sock")]);
        let text = drawn(&view);
        let own = std::process::id().to_string();
        for word in ["2 sessions", "1 leases held", "HELD BY", "1.00 MiB", "alive", "HUNG", "OPEN FOR", "host", &own] {
            assert!(text.contains(word), "no {word:?} in\n{text}");
        }
        assert_eq!(text.matches(&own).count(), 2, "the producer and the holder, uncut:\n{text}");
        let listed = crate::sessions::ls::table(&view.seen);
        assert!(listed.lines().all(|line| line.chars().count() <= 80), "{listed}");
        assert!(listed.contains("1.00 MiB") && listed.contains("does not answer"), "{listed}");
        drop(held);
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
