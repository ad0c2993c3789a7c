//! The hostile neighbour: one program with a mode for each attack.
//!
//! A mode prints a line `neighbour PID` for each process that must live on, and then `ready`.

use crate::{impostors, programs};
use std::io::Write;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// The environment variable that names the mode.
pub const ROLE: &str = "PINFOLD_TEST_ROLE";
/// The environment variable that names the folder for the mode's files.
pub const FOLDER: &str = "PINFOLD_TEST_FOLDER";
/// The environment variable that says for how many seconds a mode lives, 180 without it.
pub const LIFE: &str = "PINFOLD_TEST_LIFE";

/// The role of a process that starts all modes.
const ALL: &str = "all";

/// An attack.
pub struct Mode {
    pub name: &'static str,
    /// Whether the program runs on Pinfold. Otherwise it only pretends to.
    pub on_pinfold: bool,
    /// Whether the command may be pointed at a process that has ended by then.
    pub ends: bool,
    /// Whether `pinfold stat` must show the process, at any moment.
    pub is_shown: bool,
    act: fn(&Path),
}

const fn program(name: &'static str, act: fn(&Path)) -> Mode {
    Mode {
        name,
        on_pinfold: true,
        ends: false,
        is_shown: true,
        act,
    }
}

const fn impostor(name: &'static str, act: fn(&Path)) -> Mode {
    Mode {
        name,
        on_pinfold: false,
        ends: false,
        is_shown: false,
        act,
    }
}

/// All attacks.
pub const MODES: &[Mode] = &[
    program("name", programs::bad_name_in_a_filter),
    program("child", programs::bad_name_in_a_filtered_child),
    program("latin", programs::latin_mapping),
    program("environment", programs::environment),
    program("ringer", programs::ringer),
    program("stops", programs::stops),
    Mode {
        is_shown: false,
        ..program("executes", programs::executes)
    },
    Mode {
        ends: true,
        is_shown: false,
        ..program("ends", programs::ends)
    },
    // The one in the namespaces is a forked child, which has no numbers of its own at first.
    Mode {
        is_shown: false,
        ..program("namespaces", programs::namespaces)
    },
    program("crowd", programs::crowd),
    program("closed", programs::closed),
    impostor("sparse", impostors::sparse),
    impostor("counted", impostors::counted),
    impostor("huge", impostors::huge),
    impostor("random", impostors::random),
    impostor("absurd", impostors::absurd),
    impostor("escapes", impostors::escapes),
    impostor("answers", impostors::answers),
    impostor("profile", impostors::profile),
    impostor("blowup", impostors::blowup),
    impostor("fifo", impostors::fifo),
    impostor("symlink", impostors::symlink),
    impostor("device", impostors::device),
    impostor("truncate", impostors::truncate),
    impostor("bomb", impostors::bomb),
];

/// Becomes the neighbour in this mode. Returns after the mode's life, or at once if this user may
/// not attack in this way.
pub fn become_neighbour(name: &str, folder: &Path) {
    die_with_parent();
    if let Some(mode) = MODES.iter().find(|mode| mode.name == name) {
        (mode.act)(folder);
    } else if name == ALL {
        programs::all(folder);
    } else if !programs::become_helper(name) {
        panic!("there is no mode {name}");
    }
}

/// Has the kernel end this process when its parent ends.
pub fn die_with_parent() {
    // SAFETY: the call uses no memory of this process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Returns for how long a mode lives.
pub fn life() -> Duration {
    let seconds = std::env::var(LIFE).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(180))
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

/// Names a process that must live on.
pub fn announce(pid: u32) {
    say(&format!("neighbour {pid}"));
}

pub fn ready() {
    say("ready");
}

/// Says that this user may not attack in this way.
pub fn skip(why: &str) {
    say(&format!("skipped: {why}"));
}

/// Names this process, and waits for the end of its life.
pub fn stay() {
    announce(std::process::id());
    ready();
    sleep(life());
}
