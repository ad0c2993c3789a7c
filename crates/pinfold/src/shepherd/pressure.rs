//! Memory pressure, as the kernel and systemd report it.
//!
//! The kernel measures for how long the tasks of a cgroup waited for memory (PSI). A process can
//! poll the cgroup's `memory.pressure`. The kernel reports an event there once the tasks have
//! waited for longer than a threshold. systemd can name another file for a service to poll, in two
//! environment variables (see <https://systemd.io/MEMORY_PRESSURE>):
//!
//! | variable | says |
//! |---|---|
//! | `MEMORY_PRESSURE_WATCH` | the file; `/dev/null` forbids watching |
//! | `MEMORY_PRESSURE_WRITE` | what to write to the file first, in base64 |
//!
//! The shepherd sleeps on a futex, so that its owner can stop it. A thread cannot wait for a futex
//! and a file at once. So the shepherd wakes every [`LOOK`] and polls the file. It misses no event:
//! an event stays until it is polled.

use crate::topology::cgroup;
use core::ffi::CStr;
use core::time::Duration;
use pinfold_rseq::{kernel, syscall};

/// The time between two polls of the file. Pressure may go unnoticed for this long.
pub(super) const LOOK: Duration = Duration::from_millis(200);

/// The threshold: some tasks waited for memory for 200 ms within 2 s. The kernel allows a process
/// without privileges only windows of 2 s.
const TRIGGER: &[u8] = b"some 200000 2000000\0";
/// The pressure of the whole machine: the root cgroup has no file of its own.
const MACHINE: &CStr = c"/proc/pressure/memory";

/// A file that reports pressure.
pub(super) struct Pressure {
    file: libc::c_int,
    events: libc::c_short,
}

impl Pressure {
    /// Opens the file that reports this process's pressure. Returns `None` if the kernel has no
    /// such file, if the process has no right to it, and if the user forbids it.
    pub(super) fn watch() -> Option<Pressure> {
        let (mut path, mut text) = ([0; 1024], [0; 512]);
        let watch = pinfold_rseq::env::read("MEMORY_PRESSURE_WATCH", &mut path[..1023]);
        match watch.filter(|path| !path.is_empty()).map(<[u8]>::len) {
            Some(_) => {
                let path = CStr::from_bytes_until_nul(&path).ok()?;
                let write = pinfold_rseq::env::read("MEMORY_PRESSURE_WRITE", &mut text);
                let length = write.map_or(0, <[u8]>::len);
                let length = decode(&mut text[..length])?;
                (path != c"/dev/null").then(|| Pressure::open(path, &text[..length]))?
            }
            None => {
                let own =
                    cgroup::with_file(b"/memory.pressure", |path| Pressure::open(path, TRIGGER));
                own.flatten().or_else(|| {
                    let has_own = cgroup::with_file(b"/cgroup.procs", exists);
                    let is_root = has_own != Some(true);
                    is_root.then(|| Pressure::open(MACHINE, TRIGGER))?
                })
            }
        }
    }

    /// Opens the file or socket at `path`, and writes `first` to it.
    fn open(path: &CStr, first: &[u8]) -> Option<Pressure> {
        let flags = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        let opened = kernel::open(path, flags, 0).ok();
        let file = opened.or_else(|| connect(path))?;
        let mut pressure = Pressure { file, events: 0 };
        let is_stream = kernel::status(file).is_ok_and(|status| {
            matches!(
                status.st_mode & libc::S_IFMT,
                libc::S_IFIFO | libc::S_IFSOCK
            )
        });
        pressure.events = if is_stream {
            libc::POLLIN
        } else {
            libc::POLLPRI
        };
        let wrote = kernel::write(file, first);
        (first.is_empty() || wrote == Ok(first.len())).then_some(pressure)
    }

    /// Returns whether there was pressure since the last call. Returns an error if the file cannot
    /// report pressure any more. Never waits.
    pub(super) fn has_risen(&self) -> Result<bool, ()> {
        let mut poll = libc::pollfd {
            fd: self.file,
            events: self.events,
            revents: 0,
        };
        let at_once = [0i64; 2];
        let arguments = [
            (&raw mut poll) as usize,
            1,
            (&raw const at_once) as usize,
            0,
        ];
        // SAFETY: `poll` is one writable `pollfd`, and `at_once` has the layout of the kernel's
        // `timespec`. The null set leaves the blocked signals as they are.
        if !matches!(unsafe { syscall(libc::SYS_ppoll, arguments) }, Ok(1..)) {
            return Ok(false);
        }
        if poll.revents & (libc::POLLERR | libc::POLLNVAL | libc::POLLHUP) != 0 {
            return Err(());
        }
        if self.events == libc::POLLIN {
            self.discard();
        }
        Ok(true)
    }
}

impl Pressure {
    /// Reads and ignores the text of a stream, so that the same event is not reported again.
    fn discard(&self) {
        let mut text = [0u8; 256];
        while let Ok(1..) = kernel::read(self.file, &mut text) {}
    }
}

impl Drop for Pressure {
    fn drop(&mut self) {
        let _ = kernel::close(self.file);
    }
}

/// Returns whether there is a file at `path`.
fn exists(path: &CStr) -> bool {
    kernel::status_of(path).is_ok()
}

/// Connects to the Unix socket at `path`.
fn connect(path: &CStr) -> Option<libc::c_int> {
    // SAFETY: zeroes are a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.to_bytes_with_nul();
    let room = address.sun_path.get_mut(..bytes.len())?;
    for (to, &byte) in room.iter_mut().zip(bytes) {
        *to = byte as libc::c_char;
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let (family, kind) = (libc::AF_UNIX as usize, kind as usize);
    // SAFETY: the call takes numbers and touches no memory of the process.
    let socket = unsafe { syscall(libc::SYS_socket, [family, kind, 0]) }.ok()?;
    let arguments = [socket, (&raw const address) as usize, size_of_val(&address)];
    // SAFETY: `address` is readable for its size.
    let connected = unsafe { syscall(libc::SYS_connect, arguments) };
    let socket = socket as libc::c_int;
    if connected.is_err() {
        let _ = kernel::close(socket);
    }
    connected.ok().map(|_| socket)
}

/// Decodes base64 in place. Returns the number of bytes, or `None` if the text is not base64.
fn decode(text: &mut [u8]) -> Option<usize> {
    let (mut bits, mut count, mut length) = (0u32, 0, 0);
    for at in 0..text.len() {
        let value = match text[at] {
            byte @ b'A'..=b'Z' => byte - b'A',
            byte @ b'a'..=b'z' => byte - b'a' + 26,
            byte @ b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' if text.len() - at <= 2 && text.ends_with(b"=") => break,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            text[length] = (bits >> count) as u8;
            length += 1;
        }
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn base64_is_decoded() {
        for (text, bytes) in [
            ("", &b""[..]),
            ("cw==", b"s"),
            ("c28=", b"so"),
            ("c29tZSAyMDAwMDAgMjAwMDAwMAA=", b"some 200000 2000000\0"),
            ("+/+/", b"\xfb\xff\xbf"),
        ] {
            let mut room = [0; 64];
            room[..text.len()].copy_from_slice(text.as_bytes());
            assert_eq!(decode(&mut room[..text.len()]), Some(bytes.len()), "{text}");
            assert_eq!(&room[..bytes.len()], bytes, "{text}");
        }
        for text in ["c w=", "=c", "some 1", "\u{ff}"] {
            let mut room = [0; 64];
            room[..text.len()].copy_from_slice(text.as_bytes());
            assert_eq!(decode(&mut room[..text.len()]), None, "{text}");
        }
    }
}
