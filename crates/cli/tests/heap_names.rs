//! Names of functions in heap profiles: which files they are read from, and what becomes of foreign
//! text. `hostile.rs` has the attacks of running processes.
//!
//! Each profile here is a file, made as a process writes it. So its list of mappings can say
//! anything.

mod texts;

use pinfold::internal::profile::{HEAP_MAGIC, HEAP_VERSION, Head, RECORDS_AT, Record};
use std::fs;
use std::io::{Read, Write};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use texts::assert_has;

/// Much longer than any of these commands takes, on a slow machine too.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the profile's process has mapped the file.
const START: u64 = 0x1000_0000;

// C++'s code for `std::string` is this function's name. Only the symbol table has it.
std::arch::global_asm!(
    ".text",
    ".globl Ss",
    ".type Ss, %function",
    "Ss:",
    "ret",
    "ret",
    ".size Ss, .-Ss",
);

unsafe extern "C" {
    fn Ss();
}

/// A profile of one call stack in a file.
struct Profile {
    folder: TempDir,
    file: PathBuf,
}

impl Profile {
    /// Makes a profile. `maps` is its list of mappings, and `in_use` is how many of its ten samples
    /// are in use.
    fn new(address: u64, maps: &[u8], in_use: u64) -> Profile {
        let mut bytes = vec![0; RECORDS_AT + size_of::<Record>()];
        let mut put = |at: usize, word: u64| bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        put(0, HEAP_MAGIC);
        put(
            offset_of!(Head, version),
            u64::from(HEAP_VERSION) | 77 << 32,
        );
        put(offset_of!(Head, interval), 4096);
        put(
            offset_of!(Head, used),
            1 | (size_of::<Record>() as u64) << 32,
        );
        for (field, value) in [
            (offset_of!(Record, depth), 1),
            (offset_of!(Record, samples), 10),
            (offset_of!(Record, freed_samples), 10 - in_use),
            (offset_of!(Record, objects), 10 << 10),
            (offset_of!(Record, bytes), 1_000_000),
            (offset_of!(Record, freed_objects), (10 - in_use) << 10),
            (offset_of!(Record, freed_bytes), (10 - in_use) * 100_000),
            (offset_of!(Record, frames), address),
        ] {
            put(RECORDS_AT + field, value);
        }
        bytes.extend_from_slice(maps);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("profile");
        fs::write(&file, bytes).unwrap();
        Profile { folder, file }
    }

    /// Makes a profile of a call in `Ss`, with this path, and with the inode of this file plus
    /// `distance`.
    fn of_function(path: &Path, distance: u64) -> Profile {
        let about = fs::metadata(own()).unwrap();
        let (device, inode) = (about.dev(), about.ino() + distance);
        Profile::new(
            START + offset_of_function() + 1,
            &mapping(path, device, inode),
            10,
        )
    }

    /// Runs `pinfold heap dump` on the profile.
    fn dump(&self, options: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        command.args(["heap", "dump"]).arg(&self.file).args(options);
        finish(&mut command)
    }

    fn text(&self, options: &[&str]) -> String {
        let output = self.dump(options);
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Runs a command to its end, which must come in time.
fn finish(command: &mut Command) -> Output {
    let begin = Instant::now();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it does not end: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn pipe_in(folder: &TempDir) -> PathBuf {
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    pipe
}

fn own() -> PathBuf {
    std::env::current_exe().unwrap().canonicalize().unwrap()
}

/// Returns where `Ss` is in this test's file.
fn offset_of_function() -> u64 {
    let address = Ss as *const () as u64;
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let offset = maps.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).unwrap();
        let offset = hex(words.nth(1)?);
        (hex(start)..hex(end))
            .contains(&address)
            .then(|| address - hex(start) + offset)
    });
    offset.unwrap()
}

/// Returns a line of the list of mappings.
fn mapping(path: &Path, device: u64, inode: u64) -> Vec<u8> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let end = START + (1 << 30);
    let numbers = format!("{START:x}-{end:x} r-xp 00000000 {major:02x}:{minor:02x} {inode} ");
    [numbers.as_bytes(), path.as_os_str().as_bytes(), b"\n"].concat()
}

#[test]
fn c_functions_keep_their_names() {
    let text = Profile::of_function(&own(), 0).text(&["--stacks", "1"]);
    assert!(text.lines().any(|line| line == "    Ss"), "{text}");
}

#[test]
fn a_file_that_was_replaced_names_nothing() {
    let text = Profile::of_function(&own(), 1).text(&[]);
    assert!(text.contains("another file has replaced it"), "{text}");
    assert!(text.contains("+0x"), "{text}");
}

#[test]
fn links_and_pipes_under_a_mapping_are_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(own(), &link).unwrap();
    let text = Profile::of_function(&link, 0).text(&[]);
    assert_has(&text, &["no names from", "link+0x"]);

    let pipe = pipe_in(&folder);
    let about = fs::metadata(&pipe).unwrap();
    let maps = mapping(&pipe, about.dev(), about.ino());
    let text = Profile::new(START + 100, &maps, 10).text(&[]);
    assert!(text.contains("it is not a regular file"), "{text}");
    assert!(text.contains("pipe+0x64"), "{text}");
}

#[test]
fn foreign_text_is_escaped_once_and_begins_no_line() {
    let path = Path::new("/none/a\u{1b}]0;x\u{7}\\012\u{9b}31m\tb");
    let profile = Profile::new(START + 100, &mapping(path, 1, 1), 10);
    for options in [&[][..], &["--stacks", "1"], &["--json"]] {
        let text = profile.text(options);
        let is_harmless = |c: char| !c.is_control() || c == '\n';
        assert!(text.chars().all(is_harmless), "{text:?}");
    }
    let shown = "a\\u001b]0;x\\u0007\\012\\u009b31m\\u0009b+0x64";
    assert!(profile.text(&[]).contains(shown), "{}", profile.text(&[]));
    let json: serde_json::Value = serde_json::from_str(&profile.text(&["--json"])).unwrap();
    let name = &json["stacks"][0]["functions"][0];
    assert_eq!(name, "a\u{1b}]0;x\u{7}\\012\u{9b}31m\tb+0x64");

    let picture = profile.folder.path().join("x.svg");
    profile.text(&["--flame", picture.to_str().unwrap()]);
    let picture = fs::read_to_string(picture).unwrap();
    assert!(
        picture.contains("]0;x") || picture.contains("]0:x"),
        "{picture}"
    );
    assert!(!picture.contains(['\u{1b}', '\u{7}', '\u{9b}']));
}

#[test]
fn a_dash_is_standard_output() {
    let profile = Profile::of_function(&own(), 0);
    let output = profile.dump(&["-o", "-"]);
    assert!(output.stdout.starts_with(&[0x1f, 0x8b]));
    let output = profile.dump(&["--flame", "-"]);
    assert!(output.stdout.ends_with(b"</svg>\n") || output.stdout.ends_with(b"</svg>"));
    assert!(!Path::new("-").exists());
}

#[test]
fn a_pipe_without_a_reader_is_refused() {
    let profile = Profile::of_function(&own(), 0);
    let pipe = pipe_in(&profile.folder);
    let output = profile.dump(&["-o", pipe.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("nothing reads from"), "{error}");
}

/// Another user may have put a pipe under the name that this user gives.
#[test]
fn profiles_are_read_from_regular_files_and_standard_input() {
    let profile = Profile::of_function(&own(), 0);
    let pipe = pipe_in(&profile.folder);
    let pipe = pipe.to_str().unwrap();
    let dump = |arguments: &[&str], input: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        finish(command.args(["heap", "dump"]).args(arguments).stdin(input))
    };
    let file = profile.file.to_str().unwrap();
    for arguments in [&[pipe][..], &[file, "--diff", pipe], &["/dev/zero"]] {
        let output = dump(arguments, Stdio::null());
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("not a regular file"), "{error}");
    }
    let written = profile.dump(&["-o", "-"]);
    let mut cat = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = cat.stdout.take().unwrap();
    let mut input = cat.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&written.stdout));
    let read = dump(&["-"], Stdio::from(output));
    writer.join().unwrap().unwrap();
    cat.wait().unwrap();
    assert_eq!(read.status.code(), Some(0));
    let text = String::from_utf8(read.stdout).unwrap();
    assert!(text.contains("in use"), "{text}");
}

#[test]
fn blocks_that_were_all_freed_are_not_called_unsampled() {
    let profile = Profile::new(START, b"", 0);
    let text = profile.text(&[]);
    assert!(text.contains("all sampled blocks were freed"), "{text}");
    let text = profile.text(&["--alloc"]);
    assert!(text.contains("10 samples"), "{text}");
}

#[test]
fn the_process_that_names_answers_nobody_else() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.arg("name-functions").stdin(Stdio::null());
    let output = finish(&mut command);
    assert_eq!(output.status.code(), Some(2));
    let mut help = String::new();
    let output = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .arg("--help")
        .output();
    (&output.unwrap().stdout[..])
        .read_to_string(&mut help)
        .unwrap();
    assert!(!help.contains("name-functions"));
}

/// A user who shares the folder may have put anything under the name of the file. The library
/// replaces none of it, and the user who waits for the profile must hear of that.
#[test]
fn a_profile_that_could_not_be_written_is_refused_before_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("heap");
    let file = file.to_str().unwrap();
    let said = |script: &str, more: &str| {
        // `exec` keeps the number of the shell's process.
        let run = format!("{script}; exec \"$PINFOLD\" run {more} --heap-file \"$1\" echo ran");
        let output = Command::new("sh")
            .args(["-c", &run, "sh", file])
            .env("PINFOLD", env!("CARGO_BIN_EXE_pinfold"))
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    for (plant, why) in [
        ("mkfifo", "not a regular file"),
        ("mkdir", "not a regular file"),
        ("ln -s /dev/null", "not a regular file"),
        ("ln -s /no/such/file", "not a regular file"),
    ] {
        let (status, out, error) = said(&format!("{plant} \"$1.$$\""), "");
        assert_eq!((status, &out[..]), (Some(2), ""), "{plant}: {error}");
        assert_has(&error, &[why, file, "remove it"]);
    }
    let (status, out, error) = said("echo > \"$1.$$\"", "");
    assert_eq!((status, &out[..]), (Some(0), "ran\n"), "{error}");
    let (status, _, error) = said("mkdir \"$1\"", "");
    assert_eq!(status, Some(2), "a folder");
    assert!(error.contains("this is a folder"), "{error}");
}
