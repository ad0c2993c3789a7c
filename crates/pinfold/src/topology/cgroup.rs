//! The memory limit of the process's cgroup.
//!
//! A cgroup's memory is bounded by its own limit and by the limits of all cgroups above it. Each
//! limit is in a file of its own, below a mount point that may be anywhere. So the limits are found
//! in three steps:
//!
//! 1. `/proc/self/cgroup` names the process's cgroup and the version of its memory controller.
//! 2. The limits are usually below `/sys/fs/cgroup`. If no limit is there, `/proc/self/mountinfo`
//!    tells where the hierarchy is mounted, and which cgroup is at the mount point.
//! 3. Every level is read, from the process's cgroup up to the mount point.
//!
//! In a namespace, the cgroup's name may lead outside of the mounted part of the hierarchy. Then
//! only the levels that are visible count: at least the mount point.
//!
//! Nothing here allocates. A thread that allocates may have little stack, so names and paths are
//! built in a static buffer. A cgroup with a name longer than [`NAME`] counts as one without a
//! limit.

use crate::lock::{Lock, Rank, Word};
use crate::sys::{Text, for_each_line, number_at_start, read_once};
use core::ffi::CStr;

/// The file that names this process's cgroups.
const OWN: &[u8] = b"/proc/self/cgroup";
/// The longest name of a cgroup that is read.
const NAME: usize = 512;
/// The longest path: a test's root, a mount point, a cgroup and a file.
const PATH: usize = 1024;
/// The longest line that is read. Longer lines are passed over.
const LINE: usize = NAME + 256;
/// The longest test root, with the name of a file behind it.
const ROOT: usize = 192;

/// The buffers that would take too much stack.
struct Room {
    name: Text<NAME>,
    path: Text<PATH>,
    line: [u8; LINE],
}

/// A fork takes this lock together with the arenas' locks.
static ROOM: Lock<Room> = Lock::new(
    Rank::Cgroup,
    Room {
        name: Text::new(),
        path: Text::new(),
        line: [0; LINE],
    },
);

/// The version of the cgroup interface, which determines the files with the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Returns the folder in which the hierarchy is usually mounted.
    fn usual_mount(self) -> &'static [u8] {
        match self {
            Version::One => b"/sys/fs/cgroup/memory",
            Version::Two => b"/sys/fs/cgroup",
        }
    }

    /// Returns the names of the files with limits. A cgroup without the first file has none of
    /// these files.
    fn files(self) -> &'static [&'static [u8]] {
        match self {
            Version::One => &[b"/memory.limit_in_bytes"],
            Version::Two => &[b"/memory.max", b"/memory.high"],
        }
    }
}

/// Calls `f` with the path `path` and `more` behind it. Returns `None` if there is no room.
fn with<const N: usize, R>(
    path: &mut Text<N>,
    more: &[u8],
    f: impl FnOnce(&CStr) -> R,
) -> Option<R> {
    let length = path.get().len();
    let fits = path.push(more);
    let result = fits.then(|| f(path.as_c_str()));
    path.truncate(length);
    result
}

/// Reads the smallest limit on the memory of the process's cgroup, in bytes. Returns `usize::MAX`
/// if there is no limit, and `None` if another thread is reading the limit.
///
/// `root` stands in front of every path. It is empty except in tests. Reads one file, and one or
/// two files for each level of the cgroup.
pub(crate) fn memory_limit(root: &[u8]) -> Option<usize> {
    let mut room = ROOM.try_lock()?;
    let version = own(root, OWN, &mut room);
    let limit = version.and_then(|version| limit_of(root, version, &mut room));
    Some(limit.unwrap_or(usize::MAX))
}

/// Finds the smallest limit on the memory of a process, and calls `f` with the limit in bytes and
/// with the folder of the cgroup that has it. Returns `None` if it finds no limit, and in a signal
/// handler that may not wait for the buffer's lock.
///
/// `list` is the path of the process's file `cgroup`. `root` stands in front of every path.
pub fn with_tightest<R>(root: &[u8], list: &[u8], f: impl FnOnce(usize, &[u8]) -> R) -> Option<R> {
    let mut room = ROOM.lock()?;
    let version = own(root, list, &mut room)?;
    let limit = limit_of(root, version, &mut room).filter(|&limit| limit < usize::MAX)?;
    Some(f(limit, room.path.get()))
}

/// Returns the word of this module's lock, for a fork.
pub(crate) fn lock_word() -> &'static Word {
    ROOM.word()
}

/// Calls `f` with the path of a file of the process's cgroup in the second version's hierarchy, at
/// its usual place. Returns `None` if there is no such cgroup.
pub(crate) fn with_file<R>(file: &[u8], f: impl FnOnce(&CStr) -> R) -> Option<R> {
    let mut room = ROOM.lock()?;
    let Room { name, path, line } = &mut *room;
    let mut found = false;
    for_own(b"", OWN, line, |version, own| {
        if version == Version::Two {
            found = name.set(own);
        }
    });
    let rest = if name.get() == b"/" { b"" } else { name.get() };
    let fits = found && path.set(Version::Two.usual_mount()) && path.push(rest);
    if fits { with(path, file, f) } else { None }
}

/// Calls `f` with the path of `file` below `root`. Returns `None` if the path is too long.
fn at_root<R>(root: &[u8], file: &[u8], f: impl FnOnce(&CStr) -> R) -> Option<R> {
    let mut path = Text::<ROOT>::new();
    if path.push(root) {
        with(&mut path, file, f)
    } else {
        None
    }
}

/// Calls `each` with the version and the name of the cgroups that may limit the process's memory,
/// by its file `list`.
fn for_own(root: &[u8], list: &[u8], room: &mut [u8], mut each: impl FnMut(Version, &[u8])) {
    at_root(root, list, |path| {
        for_each_line(path, room, |line| {
            let mut fields = line.splitn(3, |&byte| byte == b':');
            let (id, controllers, name) = (fields.next(), fields.next(), fields.next());
            let (Some(controllers), Some(name)) = (controllers, name) else {
                return;
            };
            if has_item(controllers, b"memory") {
                each(Version::One, name);
            } else if id == Some(b"0") && controllers.is_empty() {
                each(Version::Two, name);
            }
        });
    });
}

/// Stores the name of the cgroup that limits the process's memory, and returns its version.
///
/// If a version-1 hierarchy with the memory controller is listed, that one limits the memory, even
/// beside a version-2 one: a controller belongs to only one hierarchy, and version 2 is listed even
/// without it.
fn own(root: &[u8], list: &[u8], room: &mut Room) -> Option<Version> {
    let Room { name, line, .. } = room;
    let mut found = None;
    for_own(root, list, line, |version, own| {
        if found != Some(Version::One) {
            found = name.set(own).then_some(version);
        }
    });
    found
}

/// Returns whether a list separated by commas has `item`.
fn has_item(list: &[u8], item: &[u8]) -> bool {
    list.split(|&byte| byte == b',').any(|one| one == item)
}

/// Returns the smallest limit of the cgroup whose name is in `room`, and of the cgroups above it,
/// and leaves the path of the cgroup that has it in `room`. Returns `None` if no file has a limit.
fn limit_of(root: &[u8], version: Version, room: &mut Room) -> Option<usize> {
    let Room { name, path, line } = room;
    let mut below_mount = |at: &[u8], above: &[u8]| {
        let set = |path: &mut Text<PATH>| {
            let mount = path.set(root) && path.push(at);
            let end = path.get().len();
            (mount && path.push(below(name.get(), above))).then_some(end)
        };
        let end = set(path)?;
        let (limit, length) = lowest(version, path, end)?;
        // The names of files are where the path of a lower cgroup was.
        set(path)?;
        path.truncate(length);
        Some(limit)
    };
    let usual = below_mount(version.usual_mount(), b"/");
    // The root cgroup has no files.
    if usual.is_some() || name.get() == b"/" {
        return usual;
    }
    let mut mounted = None;
    at_root(root, b"/proc/self/mountinfo", |path| {
        for_each_line(path, line, |line| {
            let mount = Mount::parse(line).filter(|mount| mount.version == version);
            if let Some(mount) = mount.filter(|_| mounted.is_none()) {
                mounted = below_mount(mount.at, mount.root);
            }
        });
    });
    mounted
}

/// The contents of a line of `mountinfo` about a cgroup hierarchy.
struct Mount<'l> {
    version: Version,
    /// The cgroup at the mount point.
    root: &'l [u8],
    at: &'l [u8],
}

impl Mount<'_> {
    fn parse(line: &[u8]) -> Option<Mount<'_>> {
        let mut words = line.split(|&byte| byte == b' ');
        let root = words.nth(3)?;
        let at = words.next()?;
        words.find(|&word| word == b"-")?;
        let version = match (words.next()?, words.nth(1)?) {
            (b"cgroup2", _) => Version::Two,
            (b"cgroup", options) if has_item(options, b"memory") => Version::One,
            _ => return None,
        };
        Some(Mount { version, root, at })
    }
}

/// Returns the part of `name` below the cgroup `root`. Returns an empty name if `name` lies
/// elsewhere.
fn below<'n>(name: &'n [u8], root: &[u8]) -> &'n [u8] {
    if name == b"/" || name.starts_with(b"/..") {
        return b"";
    }
    let root = if root == b"/" { b"" } else { root };
    match name.strip_prefix(root) {
        Some(rest) if rest.starts_with(b"/") => rest,
        _ => b"",
    }
}

/// Returns the smallest limit from the cgroup at `path` up to the mount point, which is the first
/// `end` bytes of the path, and the length of the path that has it. Returns `None` if no level has
/// a file.
fn lowest(version: Version, path: &mut Text<PATH>, end: usize) -> Option<(usize, usize)> {
    let mut lowest: Option<(usize, usize)> = None;
    loop {
        for file in version.files() {
            let Some(limit) = with(path, file, limit_in).flatten() else {
                break;
            };
            if lowest.is_none_or(|(lowest, _)| limit < lowest) {
                lowest = Some((limit, path.get().len()));
            }
        }
        let rest = &path.get()[end..];
        match rest.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => path.truncate(end + slash),
            None => return lowest,
        }
    }
}

/// Returns the limit in a file, or `usize::MAX` for "max". Returns `None` if there is no such file.
fn limit_in(path: &CStr) -> Option<usize> {
    let mut text = [0; 32];
    let text = match read_once(path, &mut text) {
        0 => return None,
        length => &text[..length],
    };
    if !text[0].is_ascii_digit() {
        return Some(usize::MAX);
    }
    // The first version's "no limit" is the largest number of whole pages.
    let limit = number_at_start(text);
    Some(if limit >= 1 << 62 { usize::MAX } else { limit })
}

#[cfg(test)]
mod tests {
    use super::memory_limit;
    use std::os::unix::ffi::OsStrExt;
    use std::string::ToString;

    /// Returns the limit that a machine with these files has.
    fn limit(files: &[(&str, &str)]) -> usize {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        // Another test may be reading a limit just now.
        loop {
            if let Some(limit) = memory_limit(root.path().as_os_str().as_bytes()) {
                return limit;
            }
            std::thread::yield_now();
        }
    }

    const OWN: &str = "proc/self/cgroup";
    const MOUNTS: &str = "proc/self/mountinfo";
    const MAX: usize = usize::MAX;

    #[test]
    fn every_level_of_the_second_version_counts() {
        let files = |leaf: [&str; 2], middle: [&str; 2]| {
            limit(&[
                (OWN, "0::/a.slice/b.scope\n"),
                ("sys/fs/cgroup/a.slice/b.scope/memory.max", leaf[0]),
                ("sys/fs/cgroup/a.slice/b.scope/memory.high", leaf[1]),
                ("sys/fs/cgroup/a.slice/memory.max", middle[0]),
                ("sys/fs/cgroup/a.slice/memory.high", middle[1]),
            ])
        };
        assert_eq!(files(["max\n", "max\n"], ["max\n", "max\n"]), MAX);
        assert_eq!(files(["4096000\n", "max\n"], ["max\n", "max\n"]), 4_096_000);
        assert_eq!(
            files(["4096000\n", "2048000\n"], ["max\n", "max\n"]),
            2_048_000
        );
        assert_eq!(
            files(["4096000\n", "max\n"], ["1024000\n", "max\n"]),
            1_024_000
        );
        assert_eq!(files(["max\n", "max\n"], ["max\n", "512000\n"]), 512_000);
        assert_eq!(files(["0\n", "max\n"], ["max\n", "512000\n"]), 0);
    }

    #[test]
    fn a_level_without_the_controller_is_passed_over() {
        let files = [
            (OWN, "0::/a/b/c\n"),
            ("sys/fs/cgroup/a/memory.max", "8192000\n"),
        ];
        assert_eq!(limit(&files), 8_192_000);
    }

    #[test]
    fn a_container_sees_its_own_cgroup_as_the_root() {
        let inside = ("sys/fs/cgroup/memory.max", "67108864\n");
        assert_eq!(limit(&[(OWN, "0::/\n"), inside]), 64 << 20);
        assert_eq!(limit(&[(OWN, "0::/\n")]), MAX);
        // The name as the host knows it. It is not mounted here.
        assert_eq!(limit(&[(OWN, "0::/docker/0123abcd\n"), inside]), 64 << 20);
        assert_eq!(limit(&[(OWN, "0::/../sibling\n"), inside]), 64 << 20);
    }

    #[test]
    fn the_first_versions_controller_wins() {
        let own = "12:cpu,cpuacct:/x\n4:memory:/x/y\n1:name=systemd:/z\n0::/z\n";
        let files = [
            (OWN, own),
            (
                "sys/fs/cgroup/memory/x/y/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            (
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
                "268435456\n",
            ),
            ("sys/fs/cgroup/z/memory.max", "1000\n"),
        ];
        assert_eq!(limit(&files), 256 << 20);
        assert_eq!(limit(&files[..2]), MAX);
        // The order of the lines does not matter.
        let own = "0::/z\n4:memory:/x\n";
        assert_eq!(limit(&[(OWN, own), files[2], files[3]]), 256 << 20);
    }

    #[test]
    fn a_hierarchy_elsewhere_is_found_by_its_mount() {
        let mounts = "22 1 0:21 / /proc rw - proc proc rw\n\
            31 23 0:28 / /run/cg1/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n\
            32 23 0:29 /docker/01 /run/cg1/mem rw shared:10 master:2 - cgroup cgroup rw,memory\n\
            33 23 0:30 / /run/cg2 rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let one = "run/cg1/mem/memory.limit_in_bytes";
        let files = [
            (MOUNTS, mounts),
            (OWN, "4:memory:/docker/01\n0::/\n"),
            (one, "1048576\n"),
        ];
        assert_eq!(limit(&files), 1 << 20);
        let deeper = [
            (MOUNTS, mounts),
            (OWN, "4:memory:/docker/01/worker\n"),
            (one, "1048576\n"),
            ("run/cg1/mem/worker/memory.limit_in_bytes", "65536\n"),
        ];
        assert_eq!(limit(&deeper), 65536);
        // The other container's name begins with this one's.
        let other = [
            (MOUNTS, mounts),
            (OWN, "4:memory:/docker/012\n"),
            (one, "1048576\n"),
            ("run/cg1/mem/2/memory.limit_in_bytes", "65536\n"),
        ];
        assert_eq!(limit(&other), 1 << 20);
        let two = [
            (MOUNTS, mounts),
            (OWN, "0::/a\n"),
            ("run/cg2/a/memory.max", "123\n"),
        ];
        assert_eq!(limit(&two), 123);
    }

    #[test]
    fn nonsense_counts_as_no_limit() {
        assert_eq!(limit(&[]), MAX);
        for own in ["", "\n", "0:", "0::", "::/x", "x\n0:/a\n"] {
            assert_eq!(limit(&[(OWN, own)]), MAX, "{own:?}");
        }
        let long = "0::/".to_string() + &"x".repeat(2000) + "\n";
        let inside = ("sys/fs/cgroup/memory.max", "4096\n");
        assert_eq!(limit(&[(OWN, &long), inside]), MAX);
        // A long line of another hierarchy is passed over.
        let both = "5:pids:/".to_string() + &"y".repeat(2000) + "\n0::/\n";
        assert_eq!(limit(&[(OWN, &both), inside]), 4096);
        let empty = ("sys/fs/cgroup/memory.max", "");
        assert_eq!(limit(&[(OWN, "0::/\n"), empty]), MAX);
    }
}
