//! What is on the screen, and what the keys do to it.

use super::Args;
use super::view::{Key, Show, View};
use crate::foreign::{Identity, Process};
use crate::live::list;
use crate::live::source::{Source, Unreadable};
use anyhow::{Context, Result};
use ratatui::crossterm::event::KeyCode;

/// What is watched.
pub enum Watched {
    Process(Source, Box<View>),
    All(List),
}

/// The table of all processes.
#[derive(Default)]
pub struct List {
    pub rows: Vec<list::Row>,
    /// The place of the chosen row.
    pub at: usize,
    /// How many rows the last picture had room for.
    pub page: usize,
}

pub struct Screen {
    pub watched: Watched,
    /// The table of all processes from which the watched process was chosen.
    pub behind: Option<List>,
    pub has_help: bool,
    /// Why the last key did nothing, or why the screen changed without a key.
    pub notice: Option<String>,
    show: Show,
    sort: Key,
}

/// What follows from a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Draw,
    /// The numbers on the screen are old.
    Read,
    End,
}

impl Screen {
    pub fn open(args: &Args) -> Result<Screen> {
        let mut screen = Screen::of(Watched::All(List::default()), args.show, args.sort);
        if let Some(pid) = args.pid {
            screen.watched = screen
                .process(pid)
                .with_context(|| format!("process {pid}"))?;
        }
        Ok(screen)
    }

    pub fn of(watched: Watched, show: Show, sort: Key) -> Screen {
        Screen {
            watched,
            behind: None,
            has_help: false,
            notice: None,
            show,
            sort,
        }
    }

    fn process(&self, pid: u32) -> Result<Watched, Unreadable> {
        let source = Source::open(pid)?;
        let view = View::new(&source, self.show, self.sort);
        Ok(Watched::Process(source, Box::new(view)))
    }

    /// Reads the numbers of this moment. Returns false if the process that the user named has
    /// ended. After the end of a process that was chosen from the table, shows the table.
    pub fn update(&mut self) -> Result<bool> {
        match &mut self.watched {
            Watched::Process(source, view) => match source.read() {
                Ok(snapshot) => view.update(Some(source.process()), snapshot),
                Err(Unreadable::Gone) if self.behind.is_none() => return Ok(false),
                Err(error) if self.behind.is_some() => {
                    self.notice = Some(format!("process {}: {error}", source.pid));
                    self.go_back();
                    return self.update();
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("process {}", source.pid));
                }
            },
            Watched::All(list) => {
                let mut rows = list::rows(&mut list::sources()?);
                rows.sort_by_key(|row| std::cmp::Reverse(row.held_bytes));
                list.take(rows);
            }
        }
        Ok(true)
    }

    /// Shows the table of all processes again. Returns false if there was none.
    fn go_back(&mut self) -> bool {
        let Some(list) = self.behind.take() else {
            return false;
        };
        if let Watched::Process(_, view) = &self.watched {
            (self.show, self.sort) = (view.show, view.key);
        }
        self.watched = Watched::All(list);
        true
    }

    /// Does what a key asks for.
    pub fn press(&mut self, code: KeyCode) -> Next {
        self.notice = None;
        if self.has_help {
            self.has_help = false;
            return match code {
                KeyCode::Char('q') => Next::End,
                _ => Next::Draw,
            };
        }
        match code {
            KeyCode::Char('q') => return Next::End,
            KeyCode::Char('?' | 'h') => self.has_help = true,
            KeyCode::Esc => {
                return match self.go_back() {
                    true => Next::Read,
                    false => Next::End,
                };
            }
            KeyCode::Enter => return self.choose(),
            _ => match &mut self.watched {
                Watched::Process(_, view) => view.press(code),
                Watched::All(list) => list.at = moved(list.at, code, list.page, list.last()),
            },
        }
        Next::Draw
    }

    /// Watches the chosen process of the table of all processes.
    fn choose(&mut self) -> Next {
        let Watched::All(list) = &mut self.watched else {
            return Next::Draw;
        };
        let Some(chosen) = list.chosen() else {
            return Next::Draw;
        };
        let (pid, list) = (chosen.pid, std::mem::take(list));
        match self.process(pid) {
            // Another process may have the number by now.
            Ok(Watched::Process(source, _)) if !is_same(&chosen, source.process()) => {
                self.watched = Watched::All(list);
                self.notice = Some(format!("process {pid}: {}", Unreadable::Gone));
                Next::Read
            }
            Ok(process) => {
                self.watched = process;
                self.behind = Some(list);
                Next::Read
            }
            Err(why) => {
                self.watched = Watched::All(list);
                self.notice = Some(format!("process {pid}: {why}"));
                Next::Draw
            }
        }
    }
}

impl List {
    fn last(&self) -> usize {
        self.rows.len().saturating_sub(1)
    }

    fn chosen(&self) -> Option<Identity> {
        self.rows.get(self.at).map(|row| row.process.clone())
    }

    /// Takes new rows. The chosen process stays the chosen one. Another process that has got its
    /// number does not.
    pub fn take(&mut self, rows: Vec<list::Row>) {
        let chosen = self.chosen();
        self.rows = rows;
        let is_chosen = |row: &list::Row| chosen.as_ref().is_some_and(|it| it.is(&row.process));
        let place = self.rows.iter().position(is_chosen);
        self.at = place.unwrap_or(self.at).min(self.last());
    }

    /// Returns the first row on the screen: the chosen one is visible.
    pub fn first(&self) -> usize {
        (self.at + 1).saturating_sub(self.page)
    }
}

/// Returns whether a process is the one that was listed.
fn is_same(listed: &Identity, process: &Process) -> bool {
    listed.is(&Identity::of(process))
}

/// Returns where a key moves to from place `at`, of places up to `last`, of which a screen shows
/// `page`.
pub fn moved(at: usize, code: KeyCode, page: usize, last: usize) -> usize {
    let page = page.max(1);
    let to = match code {
        KeyCode::Up => at.saturating_sub(1),
        KeyCode::Down => at.saturating_add(1),
        KeyCode::PageUp => at.saturating_sub(page),
        KeyCode::PageDown => at.saturating_add(page),
        KeyCode::Home => 0,
        KeyCode::End => last,
        _ => at,
    };
    to.min(last)
}
