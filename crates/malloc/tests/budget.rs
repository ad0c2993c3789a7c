//! How much free memory is kept, and what happens near limits. Each load runs in another process of
//! this program, which has the limit from its start.

#[path = "../../pinfold/tests/common/again.rs"]
mod again;

use again::passes;
use pinfold::internal::arena;
use pinfold_malloc::c::{
    pinfold_free, pinfold_malloc, pinfold_malloc_trim, pinfold_memory_limit,
    pinfold_set_memory_limit,
};
use std::ffi::c_void;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: usize = 1 << 20;

/// Blocks linked through their first words, so that holding them takes no other memory.
struct Blocks {
    first: *mut c_void,
    bytes: usize,
}

impl Blocks {
    /// Allocates blocks of `size` bytes until they have `most` bytes or an allocation fails.
    fn fill(size: usize, most: usize) -> Blocks {
        let mut blocks = Blocks {
            first: std::ptr::null_mut(),
            bytes: 0,
        };
        while blocks.bytes < most {
            let block = pinfold_malloc(size);
            if block.is_null() {
                break;
            }
            // SAFETY: the block was just allocated with `size` bytes, at least a pointer's.
            unsafe {
                block.cast::<u8>().write_bytes(1, size);
                block.cast::<*mut c_void>().write(blocks.first);
            }
            blocks.first = block;
            blocks.bytes += size;
        }
        blocks
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        while !self.first.is_null() {
            // SAFETY: `fill` allocated the block and wrote the next one's address to it.
            unsafe {
                let next = self.first.cast::<*mut c_void>().read();
                pinfold_free(self.first);
                self.first = next;
            }
        }
    }
}

/// Makes the command start with `resource` limited to `bytes`.
fn limit(command: &mut Command, resource: impl Into<i64>, bytes: usize) {
    let limit = libc::rlimit {
        rlim_cur: bytes as u64,
        rlim_max: bytes as u64,
    };
    let resource = resource.into();
    // SAFETY: `setrlimit` is a bare system call, which may be made between fork and exec.
    unsafe {
        command.pre_exec(
            move || match libc::setrlimit(resource as _, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
}

#[test]
#[ignore = "a load for the tests below"]
fn freed_memory_serves_other_sizes() {
    let tenths: usize = std::env::var("TENTHS").unwrap().parse().unwrap();
    for (size, other) in [(1000, 5000), (100, 20_000), (20_000, 64), (5000, 1000)] {
        let filled = Blocks::fill(size, usize::MAX).bytes;
        assert!(filled > 16 * MIB, "{size}: only {filled}");
        let wanted = filled / 10 * tenths;
        let again = Blocks::fill(other, wanted).bytes;
        assert!(
            again >= wanted,
            "{other} after {size}: {again} of {filled} bytes"
        );
    }
}

#[test]
#[cfg_attr(
    target_env = "musl",
    ignore = "the C library's malloc needs memory too"
)]
fn freed_memory_serves_all_sizes_at_a_resource_limit() {
    for (resource, tenths) in [(libc::RLIMIT_DATA, "9"), (libc::RLIMIT_AS, "8")] {
        passes("freed_memory_serves_other_sizes", |command| {
            limit(command.env("TENTHS", tenths), resource, 300 * MIB);
        });
    }
}

#[test]
#[ignore = "a load for the tests below"]
fn failing_calls_are_cheap() {
    let filled = Blocks::fill(1000, usize::MAX);
    let begun = std::time::Instant::now();
    for _ in 0..1000 {
        assert!(Blocks::fill(1000, 1).bytes <= 1000);
    }
    let spent = begun.elapsed();
    assert!(spent.as_millis() < 2000, "{spent:?}");
    drop(filled);
    // No memory is given back for a size that no machine has.
    assert!(pinfold_malloc(1 << 46).is_null());
}

#[test]
fn a_failed_allocation_costs_bounded_work_each_time() {
    passes("failing_calls_are_cheap", |command| {
        limit(command, libc::RLIMIT_DATA, 300 * MIB);
    });
}

#[test]
#[ignore = "a load for the tests below"]
fn phases_of_sizes() {
    let live: usize = std::env::var("LIVE").unwrap().parse().unwrap();
    for size in [64, 500, 4000, 20_000, 112, 1000, 9000, 320, 30_000, 200] {
        let filled = Blocks::fill(size, live);
        assert!(filled.bytes >= live);
    }
}

/// A memory cgroup with a limit, if this machine allows one.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str, bytes: usize) -> Option<Cgroup> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let is_one = own.lines().any(|line| line.contains(":memory:"));
        let (above, file) = match is_one {
            true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup", "memory.max"),
        };
        let path = Path::new(above).join(format!("pinfold-{name}-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        let cgroup = Cgroup(path);
        fs::write(cgroup.0.join(file), bytes.to_string()).ok()?;
        Some(cgroup)
    }

    /// Makes the command start in the cgroup.
    fn admit(&self, command: &mut Command) {
        let processes = self.0.join("cgroup.procs");
        // SAFETY: the closure runs between fork and exec. It opens and writes a file, and no other
        // thread holds a lock that this takes.
        unsafe {
            command.pre_exec(move || fs::write(&processes, std::process::id().to_string()));
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn phases_fit_a_cgroup_that_holds_one_phase() {
    let Some(cgroup) = Cgroup::new("phases", 128 * MIB) else {
        eprintln!("skipped: this machine allows no memory cgroup");
        return;
    };
    passes("phases_of_sizes", |command| {
        cgroup.admit(command.env("LIVE", (64 * MIB).to_string()));
    });
}

#[test]
#[ignore = "a load for the tests below"]
fn finds_its_hard_limit() {
    pinfold_malloc_trim(0);
    let limit = arena::hard_limit().unwrap();
    assert_eq!(limit.to_string(), std::env::var("EXPECTED").unwrap());
}

#[test]
fn the_limit_of_a_cgroup_is_found() {
    let Some(cgroup) = Cgroup::new("found", 128 * MIB) else {
        eprintln!("skipped: this machine allows no memory cgroup");
        return;
    };
    passes("finds_its_hard_limit", |command| {
        cgroup.admit(command.env("EXPECTED", (128 * MIB).to_string()));
    });
}

#[test]
#[ignore = "a load for the tests below"]
fn soft_limit_of_64_mib() {
    drop(Blocks::fill(64, 1));
    let limit = arena::memory_limit().unwrap();
    assert!(limit == 64 * MIB || limit == 96 * MIB, "{limit}");
    pinfold_set_memory_limit(64 * MIB);
    assert_eq!(pinfold_memory_limit(), 64 * MIB);
    for size in [64, 500, 4000, 20_000, 112, 1000, 9000, 320, 30_000, 200] {
        drop(Blocks::fill(size, 40 * MIB));
    }
    let peak = arena::held_peak() as usize;
    assert!(peak <= 64 * MIB, "{} KiB were held", peak >> 10);
    // An allocation beyond the limit succeeds.
    let beyond = Blocks::fill(1000, 100 * MIB);
    assert!(beyond.bytes >= 100 * MIB);
    drop(beyond);
    pinfold_set_memory_limit(0);
    assert_eq!(pinfold_memory_limit(), 0);
    assert_eq!(arena::memory_limit(), None);
}

#[test]
fn a_soft_limit_bounds_held_memory_and_fails_no_allocation() {
    passes("soft_limit_of_64_mib", |command| {
        command.env("PINFOLD_MEMORY_LIMIT", "64M");
    });
    // A percentage means a share of the hard limit.
    if let Some(cgroup) = Cgroup::new("soft", 192 * MIB) {
        passes("soft_limit_of_64_mib", |command| {
            cgroup.admit(command.env("PINFOLD_MEMORY_LIMIT", "50%"));
        });
    }
}

#[test]
#[ignore = "a load for the tests below"]
fn frees_200_mib_and_goes_on() {
    let size: usize = std::env::var("SIZE").unwrap().parse().unwrap();
    drop(Blocks::fill(size, 200 * MIB));
    let begun = std::time::Instant::now();
    while arena::held() as usize > 24 * MIB {
        let (held, waited) = (arena::held(), begun.elapsed());
        assert!(waited.as_secs() < 20, "{held} bytes are held");
        // More blocks than a sheaf has, so that some calls take the slow path.
        (0..20).for_each(|_| drop(Blocks::fill(100, 100_000)));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn what_a_program_with_one_thread_frees_goes_back_while_it_goes_on() {
    for size in [64, 1000, 20_000, 60_000] {
        passes("frees_200_mib_and_goes_on", |command| {
            command.env("SIZE", size.to_string());
        });
    }
}

#[test]
#[ignore = "a load for the tests below"]
fn first_block_within_a_small_limit() {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmData:"));
    let data: usize = line
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    let spare: usize = std::env::var("SPARE").unwrap().parse().unwrap();
    let limit_data = |bytes| {
        let limit = libc::rlimit {
            rlim_cur: bytes,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: `limit` is a structure of the type that the call reads.
        let answer = unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) };
        assert_eq!(answer, 0);
    };
    limit_data(((data + spare) << 10) as u64);
    let got = [100, 1000, 10_000].map(|size| Blocks::fill(size, 1).bytes);
    // A failing assertion needs memory for its message.
    limit_data(libc::RLIM_INFINITY);
    assert_eq!(got, [100, 1000, 10_000]);
}

#[test]
fn the_first_blocks_need_less_than_a_mib_of_data() {
    for kib in ["300", "600", "900", "1500", "3000", "6000"] {
        passes("first_block_within_a_small_limit", |command| {
            command.env("SPARE", kib);
        });
    }
}
