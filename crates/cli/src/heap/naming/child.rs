//! The process that names functions. Runs with the rights of the user whose program it is about,
//! and with limits, because the files that it reads may be made to harm their reader.

use super::{Answer, Request, Subject, Wanted, perf_map};
use crate::foreign::{Process, Unopened, open_beneath, open_mapped, open_regular};
use anyhow::{Context, Result, bail};
use pinfold_pprof::internal::elf::{self, DEBUG_FOLDERS, Debug, Elf};
use rustix::fs::{Mode, OFlags, openat};
use rustix::process::{
    DumpableBehavior, Gid, Resource, Rlimit, Signal, Uid, getegid, geteuid, getrlimit,
    set_dumpable_behavior, set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

/// The most memory. Names of the largest programs take some hundred MiB.
const MOST_MEMORY: u64 = 3 << 30;

/// How many files besides the mapped ones are open at once.
const OTHER_FILES: u64 = 64;

/// Reads the request from standard input, and answers on standard output.
pub fn main() -> Result<ExitCode> {
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text)?;
    let request: Request = serde_json::from_slice(&text)
        .context("this subcommand is for the command's own use: run `pinfold heap dump` instead")?;
    drop(text);
    limit(request.seconds, request.files.len() as u64);
    let process = match request.subject {
        Subject::Process { pid, started } => {
            let process = Process::open(pid)?;
            if process.started() != started {
                bail!("process {pid} has ended");
            }
            process
        }
        Subject::File { .. } => Process::own()?,
    };
    let root = openat(
        process.folder(),
        "root",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let root = root.ok();
    let open = || -> Vec<_> {
        let files = request.files.iter().map(|file| file.mapping.clone());
        let files = files.map(|mut mapping| {
            if let Subject::File { .. } = request.subject {
                // The addresses are of a process that may have ended.
                (mapping.start, mapping.end) = (0, 0);
            }
            open_mapped(&process, &mapping)
        });
        files.collect()
    };
    // Only root may follow the links to a process's mapped files, so they are opened before the
    // rights are given up. The paths in a saved profile are whatever its owner wrote there, so they
    // are opened after.
    let mut made = None;
    let opened = match request.subject {
        Subject::Process { .. } => {
            let status = process.status()?;
            let owner = |field| status.number(field).and_then(|id| u32::try_from(id).ok());
            let uid = owner("Uid:").context("process without a user")?;
            let gid = owner("Gid:").context("process without a group")?;
            let opened = open();
            let name = process.inner_pid().map(perf_map::name);
            give_up_rights(uid, gid)?;
            if let (Some(root), Ok(name), false) = (&root, name, request.made.is_empty())
                && let Ok(file) = open_beneath(root.as_fd(), &name)
                // Other users can put files into the folder.
                && file.metadata()?.uid() == uid
            {
                made = Some(file);
            }
            opened
        }
        Subject::File { uid, gid } => {
            give_up_rights(uid, gid)?;
            open()
        }
    };
    answer(&request, opened, root, made)
}

/// Limits what this process may use.
fn limit(seconds: u64, files: u64) {
    // On a machine with little memory, leaves half of it to other processes.
    let ram = rustix::system::sysinfo();
    let ram = (ram.totalram as u64).saturating_mul(u64::from(ram.mem_unit));
    for (resource, most) in [
        (Resource::As, MOST_MEMORY.min(ram / 2)),
        (Resource::Cpu, seconds),
        (Resource::Nofile, files + OTHER_FILES),
        (Resource::Fsize, 0),
        (Resource::Core, 0),
    ] {
        let hard = getrlimit(resource).maximum;
        let most = Some(hard.map_or(most, |hard| hard.min(most)));
        let _ = setrlimit(
            resource,
            Rlimit {
                current: most,
                maximum: most,
            },
        );
    }
}

/// Takes the rights of user `uid` and group `gid` instead of this process's own, as far as this
/// process may, and gives up everything that only root may do.
fn give_up_rights(uid: u32, gid: u32) -> Result<()> {
    set_no_new_privs(true)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let is_other = uid != geteuid() || gid != getegid();
    // A user who may look at another user's process, but not become that user, reads with his own
    // rights.
    let may_change = set_thread_groups(&[]).is_ok();
    if is_other && may_change {
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
    }
    let none = CapabilitySet::empty();
    let none = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    set_capabilities(None, none)?;
    // The user could otherwise trace this process, which has files open that only root may open.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// Names all addresses: by the symbol tables first, because these are small. What is named when
/// this process is ended stays named.
fn answer(
    request: &Request,
    opened: Vec<Result<File, Unopened>>,
    root: Option<OwnedFd>,
    made: Option<File>,
) -> Result<ExitCode> {
    let mut out = BufWriter::new(io::stdout());
    let mut files = Vec::new();
    for (nth, (wanted, opened)) in (0..).zip(request.files.iter().zip(opened)) {
        match opened {
            Ok(file) => files.push((nth, wanted, Elf::new(file))),
            Err(why) => send(&mut out, &Answer::Unopened(nth, why.to_string()))?,
        }
    }
    let debug_of = |wanted: &Wanted| Places {
        root: root.as_ref(),
        folder: PathBuf::from(OsStr::from_bytes(&wanted.mapping.path))
            .parent()
            .map(Path::to_path_buf),
    };
    for (nth, wanted, elf) in &files {
        let Some(file) = elf.parse() else {
            let why = "it is no program or library".to_owned();
            send(&mut out, &Answer::Unopened(*nth, why))?;
            continue;
        };
        send(&mut out, &Answer::BuildId(*nth, elf::build_id(&file)))?;
        elf::name_symbols(file, &debug_of(wanted), &wanted.places, |number, names| {
            send(&mut out, &Answer::Names(number, names))
        })?;
        out.flush()?;
    }
    // The file may be made to take long, so the symbols of other files come first. An error leaves
    // its names out.
    if let Some(made) = made.and_then(|file| perf_map::find(file, &request.made).ok()) {
        for (number, names) in made {
            send(&mut out, &Answer::Names(number, names))?;
        }
        out.flush()?;
    }
    for (_, wanted, elf) in &files {
        elf::name_lines(elf, &debug_of(wanted), &wanted.places, |number, names| {
            send(&mut out, &Answer::Names(number, names))
        })?;
        out.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn send(out: &mut impl Write, answer: &Answer) -> Result<()> {
    serde_json::to_writer(&mut *out, answer)?;
    out.write_all(b"\n")?;
    Ok(())
}

/// Finds files with debug information: in the system's folders, and beside the file itself.
struct Places<'r> {
    /// The process's root folder.
    root: Option<&'r OwnedFd>,
    /// The folder of the file, in the process's root.
    folder: Option<PathBuf>,
}

impl Debug for Places<'_> {
    fn by_build_id(&self, id: &[u8]) -> Option<File> {
        let mut files = elf::debug_files(id).into_iter();
        files.find_map(|path| open_regular(&path).ok())
    }

    fn by_name(&self, name: &[u8]) -> Vec<File> {
        let name = Path::new(OsStr::from_bytes(name));
        let is_plain = |path: &Path| {
            path.components()
                .all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        };
        let one_name = name.components().count() == 1 && !name.is_absolute();
        let Some(folder) = self.folder.as_deref() else {
            return Vec::new();
        };
        if !one_name || !is_plain(name) || !is_plain(folder) {
            return Vec::new();
        }
        let mut files = Vec::new();
        if let Some(root) = self.root {
            for beside in [folder.join(name), folder.join(".debug").join(name)] {
                files.extend(open_beneath(root.as_fd(), &beside));
            }
        }
        let inner = folder.strip_prefix("/").unwrap_or(folder);
        for debug in DEBUG_FOLDERS.map(Path::new) {
            files.extend(open_regular(&debug.join(inner).join(name)));
            files.extend(open_regular(&debug.join(name)));
        }
        files
    }
}
