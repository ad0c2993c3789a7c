//! Attacks by programs that run on Pinfold.

use crate::fakes;
use crate::filter;
use crate::neighbour::{FOLDER, ROLE, announce, die_with_parent, life, ready, skip, stay};
use pinfold::internal::segment::{Mailbox, Request, TRIM};
use std::ffi::{CStr, OsStr};
use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A name of 15 bytes, cut inside a character, as the kernel cuts the names of programs.
const BAD_NAME: &[u8] = b"\xd1\x81\xd0\xb5\xd1\x80\xd0\xb2\xd0\xb5\xd1\x80-1\xd1";
/// Escape sequences for a terminal. The line break would begin a line of its own.
pub const ESCAPES: &[u8] = b"ev\x1b]0;pwned\x07\x1b[2J\x9b\r\nFORGED\x7f";

/// Allocates and frees on slow paths, where a process looks for requests.
fn work() {
    let end = Instant::now() + life();
    while Instant::now() < end {
        let blocks: Vec<Vec<u8>> = (0..300)
            .map(|nth| black_box(vec![1; 30_000 + nth * 10]))
            .collect();
        drop(black_box(blocks));
        sleep(Duration::from_millis(5));
    }
}

fn announce_and_work() {
    announce(std::process::id());
    ready();
    work();
}

/// Sets the name of the process's first thread, which is the process's name.
pub fn set_name(name: &[u8]) {
    fs::write("/proc/self/comm", name).unwrap();
}

/// Has the kernel end this process at system calls that malloc does not make.
fn enter_filter() {
    let calls = [
        libc::SYS_memfd_create,
        libc::SYS_getpid,
        libc::SYS_membarrier,
    ];
    let filter = filter::filter(&calls, libc::SECCOMP_RET_KILL_PROCESS);
    filter::install(&filter, libc::SECCOMP_FILTER_FLAG_TSYNC).unwrap();
}

/// Forks a process with one thread that does `act` and ends. Returns its number.
fn fork(act: impl FnOnce()) -> u32 {
    // SAFETY: only the child's own thread runs in it, and it uses nothing that another thread of
    // the parent may have locked: Pinfold's malloc takes its locks for a fork.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let _end = End;
        die_with_parent();
        act();
    }
    child as u32
}

/// Ends the process when this value is dropped, also by a panic: a forked child must not return
/// into the test's harness.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: the process ends without running the destructors of its parent.
        unsafe { libc::_exit(0) };
    }
}

pub fn bad_name_in_a_filter(_: &Path) {
    set_name(BAD_NAME);
    announce(std::process::id());
    ready();
    enter_filter();
    work();
}

pub fn bad_name_in_a_filtered_child(_: &Path) {
    let child = fork(|| {
        set_name(BAD_NAME);
        enter_filter();
        work();
    });
    announce(child);
    announce_and_work();
}

pub fn latin_mapping(folder: &Path) {
    let path = folder.join(OsStr::from_bytes(b"caf\xe9"));
    let file = File::create_new(&path).unwrap();
    file.set_len(4096).unwrap();
    fakes::map(
        &File::open(path).unwrap(),
        4096,
        libc::PROT_READ,
        libc::MAP_SHARED,
    );
    announce_and_work();
}

/// Returns this program in another role, in the same process or a new one.
fn again(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "role", "--nocapture", "--test-threads", "1"])
        .env(ROLE, role);
    command
}

/// Does what a helper of another mode does. Returns false if there is no such helper.
pub fn become_helper(role: &str) -> bool {
    match role.rsplit_once(' ') {
        Some(("works as", name)) => {
            set_name(&unhex(name));
            announce_and_work();
        }
        Some(("writes to", pid)) => write_to_mailbox(pid),
        Some(("executes at", nth)) => execute_again(nth.parse().unwrap()),
        _ => return false,
    }
    true
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    bytes.map(byte).collect()
}

/// Has escape sequences in its name and in all variables of Pinfold's.
pub fn environment(_: &Path) {
    let mut command = again(&format!("works as {}", hex(&ESCAPES[..15])));
    for name in [
        "THP",
        "SHEPHERD",
        "HARDENED",
        "GUARD",
        "HEAP",
        "POLICY",
        "SLAB_DEBUG",
    ] {
        command.env(format!("PINFOLD_{name}"), OsStr::from_bytes(ESCAPES));
    }
    command.env("PINFOLD_MEMORY_LIMIT", OsStr::from_bytes(ESCAPES));
    panic!("{}", command.exec());
}

/// Returns where a process's mailbox can be opened.
fn mailbox_path(pid: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| {
        fs::read_link(path).is_ok_and(|link| link.as_os_str().as_bytes().starts_with(MAILBOX))
    })
}

const MAILBOX: &[u8] = b"/memfd:pinfold-mailbox";

/// A source of numbers without an order.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Works while another process of the same user rings its bell, posts requests and writes random
/// words into its mailbox.
pub fn ringer(_: &Path) {
    let own = std::process::id();
    let mut writer = again(&format!("writes to {own}"));
    writer.env_remove("LD_PRELOAD");
    let mut writer = writer.spawn().unwrap();
    announce_and_work();
    writer.wait().unwrap();
}

fn write_to_mailbox(pid: &str) {
    let path = mailbox_path(pid).expect("a mailbox");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = fakes::map(&file, size_of::<Mailbox>(), protection, libc::MAP_SHARED);
    // SAFETY: the mapping has the mailbox's size and stays. All its fields are atomics.
    let mailbox: &Mailbox = unsafe { &*at.cast() };
    let own: u32 = pid.parse().unwrap();
    let mut random = Random(u64::from(own) | 1 << 40);
    let end = Instant::now() + life();
    while Instant::now() < end {
        let what = random.next() as u32 % 40;
        let argument = random.next() >> (random.next() % 64);
        // A limit of a few bytes would only make the program slow.
        if what == TRIM || argument > 1 << 30 {
            mailbox.post(Request::new(own, what, 500), argument);
        }
        for _ in 0..20 {
            let nth = 2 + random.next() as usize % 510;
            // SAFETY: the mailbox has 512 words. All accesses are atomic.
            unsafe { (*at.cast::<AtomicU64>().add(nth)).store(random.next(), Relaxed) };
        }
        mailbox.bell.fetch_add(1, Relaxed);
        let bell = mailbox.bell.as_ptr();
        // SAFETY: the operation reads no memory but the word, which is mapped.
        unsafe { libc::syscall(libc::SYS_futex, bell, libc::FUTEX_WAKE, i32::MAX) };
        sleep(Duration::from_micros(500));
    }
}

/// Stops itself again and again, also with requests open. A child lets it go on.
pub fn stops(_: &Path) {
    let own = std::process::id() as i32;
    fork(|| {
        let end = Instant::now() + life();
        while Instant::now() < end {
            sleep(Duration::from_millis(400));
            // SAFETY: the call uses no memory of this process.
            unsafe { libc::kill(own, libc::SIGCONT) };
        }
    });
    announce(own as u32);
    ready();
    let end = Instant::now() + life();
    let mut kept = Vec::new();
    while Instant::now() < end {
        kept.push(black_box(vec![1u8; 50_000]));
        kept.truncate(100);
        if kept.len() % 50 == 49 {
            kept.clear();
            // SAFETY: the call uses no memory of this process.
            unsafe { libc::kill(own, libc::SIGSTOP) };
        }
        sleep(Duration::from_millis(1));
    }
}

/// Executes itself again and again.
pub fn executes(_: &Path) {
    announce(std::process::id());
    ready();
    execute_again(1);
}

fn execute_again(nth: u64) {
    let blocks: Vec<Vec<u8>> = (0..1000).map(|_| black_box(vec![1; 2000])).collect();
    drop(black_box(blocks));
    sleep(Duration::from_millis(10 + nth % 40));
    let mut next = again(&format!("executes at {}", nth + 1));
    // Each program's harness prints a line, which nothing reads.
    panic!("{}", next.stdout(Stdio::null()).exec());
}

/// Has children that end after a short time.
pub fn ends(_: &Path) {
    announce(std::process::id());
    ready();
    let end = Instant::now() + life();
    let mut nth = 0;
    while Instant::now() < end {
        nth += 1;
        let child = fork(|| {
            let blocks: Vec<Vec<u8>> = (0..1000).map(|_| black_box(vec![1; 2000])).collect();
            drop(black_box(blocks));
            sleep(Duration::from_millis(20 + nth % 50));
        });
        // SAFETY: the call stores nothing.
        unsafe { libc::waitpid(child as i32, null_mut(), 0) };
    }
}

/// The name of a file that no command may open.
pub const SECRET: &str = "secret";

/// Works in PID, mount and user namespaces of its own. A symbolic link lies where the file was that
/// it has mapped: the name is that of a segment of a process that counts every call.
pub fn namespaces(folder: &Path) {
    let ids = fs::metadata(folder).unwrap();
    let secret = folder.join(SECRET);
    fs::write(&secret, "secret").unwrap();
    let hidden = folder.join("mounted");
    fs::create_dir(&hidden).unwrap();
    let (uid, gid) = (ids.uid(), ids.gid());
    let told = folder.join("told");
    let outer = fork(|| {
        let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID;
        // SAFETY: the call uses no memory of this process.
        if unsafe { libc::unshare(flags) } != 0 {
            return;
        }
        let _ = fs::write("/proc/self/setgroups", "deny");
        fs::write("/proc/self/uid_map", format!("0 {uid} 1")).unwrap();
        fs::write("/proc/self/gid_map", format!("0 {gid} 1")).unwrap();
        fork(|| {
            // Fails in a changed root, whose mounts spread nowhere.
            mount(Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE);
            let has_mounted = mount(&hidden, Some(c"tmpfs"), 0);
            let path = hidden.join("1.1");
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create_new(true).open(&path);
            let file = file.unwrap();
            file.set_len(4096).unwrap();
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            fakes::map(&file, 4096, protection, libc::MAP_SHARED);
            if has_mounted && mount(&hidden, Some(c"tmpfs"), 0) {
                std::os::unix::fs::symlink(&secret, &path).unwrap();
            }
            fs::write(&told, "").unwrap();
            work();
        });
        sleep(life());
    });
    let end = Instant::now() + Duration::from_secs(10);
    while !told.exists() && Instant::now() < end {
        let mut status = 0;
        // SAFETY: `status` is writable.
        if unsafe { libc::waitpid(outer as i32, &raw mut status, libc::WNOHANG) } != 0 {
            return skip("this user cannot make namespaces");
        }
        sleep(Duration::from_millis(10));
    }
    let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap();
    announce(children.trim().parse().unwrap());
    announce(outer);
    ready();
    sleep(life());
}

/// Mounts a file system, or changes how mounts below a folder spread. Returns whether it has.
fn mount(folder: &Path, kind: Option<&CStr>, flags: libc::c_ulong) -> bool {
    let mut path = folder.as_os_str().as_bytes().to_vec();
    path.push(0);
    let (path, kind) = (path.as_ptr().cast(), kind.map_or(null(), CStr::as_ptr));
    // SAFETY: the path and the kind end with zero bytes.
    unsafe { libc::mount(c"none".as_ptr(), path, kind, flags, null()) == 0 }
}

/// Has 30,000 mappings and 1,000 threads.
pub fn crowd(_: &Path) {
    let zero = File::open("/dev/zero").unwrap();
    for nth in 0..30_000 {
        // Neighbours of one kind would become one mapping.
        let protection = [libc::PROT_READ, libc::PROT_NONE][nth % 2];
        fakes::map(&zero, 4096, protection, libc::MAP_PRIVATE);
    }
    let rest = || {
        let thread = std::thread::Builder::new().stack_size(16 << 10);
        thread.spawn(|| sleep(life())).is_ok()
    };
    let threads = (0..1000).take_while(|_| rest()).count();
    assert!(threads > 100, "{threads}");
    announce_and_work();
}

/// Closes all descriptors.
pub fn closed(_: &Path) {
    announce(std::process::id());
    ready();
    // SAFETY: the process uses no descriptor from here on.
    unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0) };
    work();
    // SAFETY: the process ends. The test's harness has nowhere to write to.
    unsafe { libc::_exit(0) };
}

/// Starts all modes, each in a process and a folder of its own, and waits.
pub fn all(folder: &Path) {
    let mut children = Vec::new();
    for mode in crate::neighbour::MODES {
        let own = folder.join(mode.name);
        fs::create_dir_all(&own).unwrap();
        let mut command = crate::neighbour_command(mode);
        children.push(command.env(FOLDER, own).spawn().unwrap());
    }
    stay();
    for child in &mut children {
        let _ = child.kill();
    }
}
