//! What `pinfold top` shows on screens of several sizes, and what its keys do.

use super::screen::{List, Next, Watched};
use super::view::View;
use super::*;
use crate::live::list;
use crate::live::snapshot::Snapshot;
use crate::live::snapshot::tests::{segment, set_call};
use crate::live::source::Source;
use pinfold::internal::segment::{Call, SlabEvent};

fn text(screen: &mut Screen, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, screen, true)).unwrap();
    text_of(&terminal)
}

fn screen(source: Source, view: View) -> Screen {
    let watched = Watched::Process(source, Box::new(view));
    Screen::of(watched, Show::Caches, Key::Bytes)
}

/// Returns a screen with a process that has these caches, by the numbers of their slabs.
fn watched(slabs: &[(usize, u64)]) -> Screen {
    let source = Source::of_this_process();
    let mut snapshot = Snapshot::parse(&segment(0)).unwrap();
    snapshot.held = 5 << 20;
    for &(nth, slabs) in slabs {
        let cache = &mut snapshot.caches[nth];
        cache.slab = 64 << 10;
        cache.nodes[0][SlabEvent::SlabAlloc as usize] = slabs;
        cache.nodes[1][SlabEvent::Refilled as usize] = 10 * slabs;
        cache.nodes[0][SlabEvent::BarnObjects as usize] = 1 + slabs / 4;
    }
    snapshot.nodes[0].used = 4 << 20;
    snapshot.nodes[1].dirty = 1 << 20;
    (snapshot.mapped, snapshot.metadata) = (12 << 20, 300 << 10);
    let mut view = View::new(&source, Show::Caches, Key::Bytes);
    view.update(None, snapshot);
    screen(source, view)
}

fn all(rows: Vec<list::Row>) -> Screen {
    let list = List {
        rows,
        ..List::default()
    };
    Screen::of(Watched::All(list), Show::Caches, Key::Bytes)
}

/// Returns the lines from the last heading on, without the line of the keys.
fn table(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let head = lines.iter().position(|line| line.contains("NAME")).unwrap();
    lines[head..lines.len() - 1].to_vec()
}

#[test]
fn the_sum_adds_up_line_by_line() {
    let Watched::Process(_, view) = watched(&[(0, 16), (2, 8)]).watched else {
        unreachable!();
    };
    let sum = view.sum;
    let objects = 160 * 16 + 80 * 48;
    assert_eq!(sum.in_barns, 5 * 16 + 3 * 48);
    assert_eq!(sum.free_in_slabs, 24 * (64 << 10) - objects);
    let large = (4 << 20) - 24 * (64 << 10);
    assert_eq!(sum.live_and_sheaves, objects - sum.in_barns + large);
    assert_eq!((sum.returned, sum.metadata), (7 << 20, 300 << 10));
    assert_eq!(sum.resident, (5 << 20) + (300 << 10));
    assert_eq!(sum.reserved, (12 << 20) + (300 << 10));
    assert!(sum.counted.is_none());
}

#[test]
fn where_calls_are_counted_the_sum_begins_with_what_was_requested() {
    let mut bytes = segment(1);
    // 100 blocks of 32 bytes were allocated for 2500 bytes, and 60 were freed.
    for (call, count) in [
        (Call::alloc(1), 100),
        (Call::free(1), 60),
        (Call::requested(1), 2500),
    ] {
        set_call(&mut bytes, 0, call, count);
    }
    let mut snapshot = Snapshot::parse(&bytes).unwrap();
    snapshot.nodes[0].used = 1 << 20;
    let cache = &mut snapshot.caches[1];
    cache.slab = 64 << 10;
    cache.nodes[0][SlabEvent::SlabAlloc as usize] = 1;
    cache.nodes[0][SlabEvent::Refilled as usize] = 90;
    cache.nodes[0][SlabEvent::BarnObjects as usize] = 20;
    let sum = Sum::of(&snapshot);
    let counted = sum.counted.unwrap();
    let large = (1 << 20) - (64 << 10);
    assert_eq!(counted.requested, 40 * 25 + large);
    assert_eq!(counted.rounding, 40 * 7);
    assert_eq!(counted.live, 40 * 32 + large);
    assert_eq!((counted.in_sheaves, sum.in_barns), (30 * 32, 20 * 32));
    assert_eq!(counted.live + counted.in_sheaves, sum.live_and_sheaves);
}

#[test]
fn what_only_counting_knows_is_told_apart() {
    for (units, words) in [(0, "live and CPUs' sheaves*"), (1, "requested, about")] {
        let source = Source::of_this_process();
        let mut view = View::new(&source, Show::Caches, Key::Bytes);
        view.update(None, Snapshot::parse(&segment(units)).unwrap());
        let shown = text(&mut screen(source, view), 80, 24);
        assert!(shown.contains(words), "{shown}");
    }
}

#[test]
fn digits_and_tab_show_other_tables() {
    let mut watched = watched(&[(0, 16)]);
    let heads = ["OBJ/SLAB", "THREADS", "DIRTY MiB", "ticks"];
    for (digit, head) in "1234".chars().zip(heads) {
        watched.press(KeyCode::Char(digit));
        let shown = text(&mut watched, 80, 24);
        assert!(shown.contains(head), "{shown}");
        assert!(shown.contains(&format!("[{digit} ")), "{shown}");
    }
    watched.press(KeyCode::Tab);
    assert!(text(&mut watched, 80, 24).contains(heads[0]));
}

#[test]
fn caches_are_sorted_and_the_column_is_marked() {
    let mut watched = watched(&[(0, 1), (1, 3), (4, 2)]);
    let order = |text: &str| {
        let names = text
            .lines()
            .filter_map(|line| line.split("kmalloc-").nth(1));
        let names: Vec<String> = names.take(3).map(str::to_owned).collect();
        names
    };
    let shown = text(&mut watched, 80, 24);
    assert!(shown.contains("*KiB"), "{shown}");
    assert_eq!(order(&shown), ["32", "80", "16"]);
    watched.press(KeyCode::Char('n'));
    let shown = text(&mut watched, 80, 24);
    assert!(shown.contains("*NAME"), "{shown}");
    assert_eq!(order(&shown), ["16", "32", "48"]);
}

#[test]
fn command_lines_have_room_for_their_arguments() {
    let commands = [
        (
            "/root/.pyenv/versions/3.11.7/bin/python3 app.py",
            "python3 app.py",
        ),
        ("python3 /a/b.py", "python3 /a/b.py"),
        ("nginx: worker /a", "nginx: worker /a"),
    ];
    let rows = (1..).zip(commands).map(|(nth, (command, _))| {
        let mut row = list::Row::with(0x7fff_ff00 + nth, "name");
        row.process.command = Some(command.into());
        row
    });
    let shown = text(&mut all(rows.collect()), 80, 12);
    for (line, (_, command)) in shown.lines().skip(2).zip(commands) {
        assert!(line.ends_with(&format!("0  {command}")), "{shown}");
    }
}

#[test]
fn keys_are_named_whole_or_not_at_all() {
    let mut process = watched(&[(0, 1)]);
    for (width, last) in [(80, "PgDn"), (30, "tables"), (20, "help"), (10, "end")] {
        let shown = text(&mut process, width, 24);
        assert!(shown.trim_end().ends_with(last), "{shown}");
    }
}

#[test]
fn every_size_of_terminal_is_drawn() {
    let mut process = watched(&[(0, 1)]);
    let mut all = all(Vec::new());
    for width in [1, 2, 10, 41, 43, 80, 300] {
        for height in [1, 2, 9, 10, 24, 100] {
            text(&mut process, width, height);
            text(&mut all, width, height);
        }
    }
    let shown = text(&mut process, 80, 24);
    assert!(shown.lines().all(|line| line.chars().count() <= 80));
    assert!(shown.contains("= reserved"), "{shown}");
}

#[test]
fn numbers_of_any_size_are_shown() {
    let mut snapshot = Snapshot::parse(&segment(0)).unwrap();
    (snapshot.held, snapshot.huge) = (u64::MAX, u64::MAX);
    (snapshot.mapped, snapshot.metadata) = (u64::MAX, u64::MAX);
    for node in &mut snapshot.nodes {
        (node.used, node.dirty) = (u64::MAX, u64::MAX);
    }
    for cache in &mut snapshot.caches {
        (cache.size, cache.slab, cache.per_slab) = (u64::MAX, u64::MAX, u64::MAX);
        cache
            .nodes
            .iter_mut()
            .for_each(|counts| counts[..].fill(u64::MAX));
    }
    let source = Source::of_this_process();
    let mut view = View::new(&source, Show::Caches, Key::Refills);
    view.update(None, snapshot);
    let mut watched = screen(source, view);
    for digit in "1234".chars() {
        watched.press(KeyCode::Char(digit));
        text(&mut watched, 80, 24);
    }
}

/// On 40 columns, the headings and numbers of neighbouring columns were one word.
#[test]
fn columns_are_apart_on_wide_and_narrow_screens() {
    let mut process = watched(&[(0, 1)]);
    for width in [40, 60, 80] {
        let shown = text(&mut process, width, 30);
        let table = table(&shown);
        let known = [
            "OBJS", "ACTIVE", "USE", "SIZE", "SLABS", "OBJ/SLAB", "*KiB", "REFILL/s", "NAME",
        ];
        for head in table[0].split_whitespace() {
            assert!(known.contains(&head), "{head}: {shown}");
        }
        // The names of caches, and the numbers by which they are sorted, are always there.
        assert!(
            table[0].contains("*KiB") && table[0].contains("NAME"),
            "{shown}"
        );
        let row = table
            .iter()
            .find(|row| row.contains("kmalloc-16"))
            .expect(&shown);
        let cells = row.split_whitespace().count();
        assert_eq!(cells, table[0].split_whitespace().count(), "{shown}");
    }
    // The sum ends before the graphs begin, and a narrow screen has no graphs.
    let shown = text(&mut process, 80, 24);
    let line = shown.lines().find(|line| line.contains("held,")).unwrap();
    assert!(line.contains(" MiB │ held, 5.0 MiB; peak"), "{line}");
    let shown = text(&mut process, 40, 24);
    assert!(!shown.contains("held,"), "{shown}");
    assert!(
        shown.lines().any(|line| line.trim_end().ends_with("MiB")),
        "{shown}"
    );
}

#[test]
fn graphs_have_a_scale() {
    let mut process = watched(&[(0, 1)]);
    let shown = text(&mut process, 80, 24);
    let mut lines = shown.lines().skip_while(|line| !line.contains("held,"));
    assert!(lines.nth(1).unwrap().contains("│ 5.0 "), "{shown}");
    assert!(lines.nth(1).unwrap().contains("│   0 "), "{shown}");
}

#[test]
fn arrows_and_pages_move_in_a_table() {
    let caches = 30;
    let mut snapshot = Snapshot::parse(&segment(0)).unwrap();
    snapshot.caches.clear();
    for nth in 1..=caches {
        let mut cache = Snapshot::parse(&segment(0)).unwrap().caches.remove(0);
        cache.name = format!("cache-{nth:02}");
        snapshot.caches.push(cache);
    }
    let source = Source::of_this_process();
    let mut view = View::new(&source, Show::Caches, Key::Name);
    view.update(None, snapshot);
    let mut process = screen(source, view);
    let shown = |process: &mut Screen| {
        let shown = text(process, 80, 20);
        let first = table(&shown)[1]
            .split_whitespace()
            .last()
            .unwrap()
            .to_owned();
        (first, shown.lines().last().unwrap().to_owned())
    };
    let (name, keys) = shown(&mut process);
    let page = 7;
    assert_eq!(name, "cache-01");
    assert!(
        keys.contains("q end") && keys.ends_with("1-7 of 30"),
        "{keys}"
    );
    for (key, from) in [
        (KeyCode::Down, 2),
        (KeyCode::PageDown, 2 + page),
        (KeyCode::Up, 1 + page),
        (KeyCode::PageUp, 1),
        (KeyCode::Up, 1),
        (KeyCode::End, caches - page + 1),
        (KeyCode::Down, caches - page + 1),
        (KeyCode::Home, 1),
    ] {
        assert_eq!(process.press(key), Next::Draw);
        let (name, keys) = shown(&mut process);
        assert_eq!(name, format!("cache-{from:02}"), "{key:?}");
        assert!(
            keys.contains(&format!(" {from}-{} of", from + page - 1)),
            "{keys}"
        );
    }
    // Another table begins with its first row.
    process.press(KeyCode::End);
    process.press(KeyCode::Tab);
    process.press(KeyCode::Char('1'));
    assert_eq!(shown(&mut process).0, "cache-01");
}

#[test]
fn a_key_shows_the_keys() {
    for key in ['?', 'h'] {
        for width in [40, 80] {
            let mut process = watched(&[(0, 1)]);
            let before = text(&mut process, width, 24);
            assert!(
                before.lines().last().unwrap().contains("? help"),
                "{before}"
            );
            process.press(KeyCode::Char(key));
            let shown = text(&mut process, width, 24);
            for words in ["Esc ", "PgDn", "c bytes of all slabs", "any key: back"] {
                assert!(shown.contains(words), "{words}: {shown}");
            }
            // The key does not do what it does otherwise.
            assert_eq!(process.press(KeyCode::Char('2')), Next::Draw);
            assert_eq!(text(&mut process, width, 24), before);
        }
    }
}

#[test]
fn a_process_of_the_table_is_watched_and_left_again() {
    let row = |pid| list::Row::with(pid, &format!("program{pid}"));
    // No process has this number.
    let mut screen = all((1..=30).map(|nth| row(0x7fff_ff00 + nth)).collect());
    let shown = text(&mut screen, 80, 12);
    let marked = |shown: &str| {
        let mut lines = shown.lines().filter(|line| line.starts_with('>'));
        let line = lines.next().expect(shown).to_owned();
        assert!(lines.next().is_none(), "{shown}");
        line
    };
    assert!(marked(&shown).ends_with("program2147483393"), "{shown}");
    for _ in 0..15 {
        screen.press(KeyCode::Down);
    }
    let shown = text(&mut screen, 80, 12);
    assert!(marked(&shown).ends_with("program2147483408"), "{shown}");
    assert_eq!(screen.press(KeyCode::Enter), Next::Draw);
    let shown = text(&mut screen, 80, 12);
    assert!(
        shown.lines().last().unwrap().contains("no such process"),
        "{shown}"
    );
    assert!(marked(&shown).ends_with("program2147483408"), "{shown}");
    assert_eq!(screen.press(KeyCode::Esc), Next::End);
    // Another process that has got the number of the chosen one is not chosen.
    let Watched::All(list) = &mut screen.watched else {
        unreachable!();
    };
    let mut later = list::Row::with(0x7fff_ff10, "later");
    later.process.started_ticks = Some(1);
    let others = (1..=40).map(|nth| list::Row::with(0x7fff_fe00 + nth, "other"));
    list.take(others.chain([later]).collect());
    let shown = text(&mut screen, 80, 12);
    assert!(marked(&shown).ends_with("other"), "{shown}");
    // The end of a process that was chosen there leads back, too.
    for has_ended in [false, true] {
        let mut screen = watched(&[(0, 1)]);
        screen.behind = Some(List::default());
        let shown = text(&mut screen, 80, 24);
        assert!(
            shown.lines().last().unwrap().contains("Esc back"),
            "{shown}"
        );
        if has_ended {
            // The process of this test shows no statistics.
            assert!(screen.update().unwrap());
        } else {
            assert_eq!(screen.press(KeyCode::Esc), Next::Read);
        }
        let shown = text(&mut screen, 80, 24);
        assert!(
            matches!(screen.watched, Watched::All(_)) && shown.contains("DIRTY MiB"),
            "{shown}"
        );
        assert_eq!(screen.notice.is_some(), has_ended);
    }
}
