use super::*;
use crate::foreign::Content;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// A file that this process has mapped.
struct Mapped {
    folder: tempfile::TempDir,
    path: PathBuf,
    at: *mut libc::c_void,
}

const SIZE: usize = 4096;

impl Mapped {
    fn new(name: &[u8]) -> Mapped {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(OsStr::from_bytes(name));
        fs::write(&path, [7; SIZE]).unwrap();
        let file = File::open(&path).unwrap();
        // SAFETY: the kernel chooses the address, so nothing is replaced.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                SIZE,
                libc::PROT_READ,
                libc::MAP_PRIVATE,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        Mapped { folder, path, at }
    }

    fn mapping(&self) -> Mapping {
        let process = own();
        let mut maps = process.maps().unwrap().map(Result::unwrap);
        let is_this = |mapping: &Mapping| mapping.start == self.at.addr() as u64;
        maps.find(is_this).unwrap()
    }

    /// Opens the file by its path, as for a user who may not use `map_files`.
    fn open(&self) -> Result<File, Unopened> {
        beneath_root(&own(), &self.mapping())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping.
        unsafe { libc::munmap(self.at, SIZE) };
    }
}

fn own() -> Process {
    Process::own().unwrap()
}

#[test]
fn a_file_is_opened_by_any_name() {
    for name in [
        &b"plain"[..],
        b"caf\xe9",
        b"two\nlines",
        b"back\\slash (deleted)",
    ] {
        let mapped = Mapped::new(name);
        let content = Content::of_file(mapped.open().unwrap()).unwrap();
        assert_eq!(content.read(0, 10).unwrap(), [7; 10]);
        assert!(open_mapped(&own(), &mapped.mapping()).is_ok());
    }
}

#[test]
fn what_replaced_a_file_is_not_opened() {
    type Replace = fn(&Path);
    let replaces: [Replace; 4] = [
        |path| fs::write(path, "another").unwrap(),
        |path| symlink("/etc/hostname", path).unwrap(),
        |path| fs::create_dir(path).unwrap(),
        |path| {
            let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
            // SAFETY: `path` is a text that ends with zero.
            assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o644) }, 0);
        },
    ];
    for replace in replaces {
        let mapped = Mapped::new(b"file");
        fs::remove_file(&mapped.path).unwrap();
        assert!(mapped.open().is_err());
        replace(&mapped.path);
        assert!(mapped.open().is_err());
        // A removed file has a name like this one in the list of mappings.
        let mut deleted = mapped.path.clone().into_os_string();
        deleted.push(" (deleted)");
        replace(Path::new(&deleted));
        assert_eq!(mapped.mapping().path, deleted.as_bytes());
        assert!(mapped.open().is_err());
        // The mapping's own file is opened if this user may use `map_files`, and nothing else.
        if let Ok(file) = open_mapped(&own(), &mapped.mapping()) {
            assert_eq!(file.metadata().unwrap().len(), SIZE as u64);
        }
    }
}

#[test]
fn no_link_on_the_way_is_followed() {
    let mapped = Mapped::new(b"file");
    let folder = mapped.folder.path();
    let moved = folder.with_extension("moved");
    fs::rename(folder, &moved).unwrap();
    symlink(&moved, folder).unwrap();
    // The list of mappings shows where the file is now.
    let mapping = Mapping {
        path: mapped.path.as_os_str().as_bytes().to_vec(),
        ..mapped.mapping()
    };
    assert!(beneath_root(&own(), &mapping).is_err());
    assert!(mapped.open().is_ok());
    fs::remove_file(folder).unwrap();
    fs::rename(&moved, folder).unwrap();
}

#[test]
fn only_regular_files_are_opened() {
    let null = File::open("/dev/null").unwrap();
    let link = format!("fd/{}", null.as_raw_fd());
    let found = regular(&own(), &link, |_| true);
    assert!(matches!(found, Err(Unopened::NotRegular)));
    let file = tempfile::tempfile().unwrap();
    let link = format!("fd/{}", file.as_raw_fd());
    assert!(regular(&own(), &link, |_| true).is_ok());
    assert!(matches!(
        regular(&own(), &link, |_| false),
        Err(Unopened::Replaced)
    ));
}

#[test]
fn the_mount_of_a_file_is_found() {
    let mapped = Mapped::new(b"file");
    let found = find(CWD, mapped.path.to_str().unwrap()).unwrap();
    let (device, kind) = mount_of(&own(), found.as_fd()).unwrap();
    assert!(!kind.is_empty());
    assert!(device == mapped.mapping().device || kind == b"overlay");
}
