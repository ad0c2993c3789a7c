//! `cargo xtask root`: a command in a root file system of another Debian release, on this machine's
//! kernel. See vm/README.md.

use super::arch::Arch;
use super::packages::{filled, tool};
use super::suites::{self, KEYRING, Release};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command in a root file system of another Debian release.
///
/// The command sees this machine's kernel, and this folder and the Rust toolchain at their own
/// paths. When the command ends, the processes that it has started end too.
#[derive(clap::Args)]
pub struct Args {
    /// The version of the root's C library, such as 2.31 or 2.43.
    #[arg(long, value_name = "VERSION")]
    libc: String,
    /// A Debian package to install in the root. It stays installed.
    #[arg(long = "package", value_name = "NAME")]
    packages: Vec<String>,
    /// Only makes the root, and installs the packages.
    #[arg(long)]
    prepare: bool,
    /// The command to run. The default is a shell.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Mounts what a program expects, and runs the command. `unshare` has made a mount namespace, so
/// the mounts end with it. The arguments are the root, the folder to start in, the folders to show,
/// `--`, and the command.
const SCRIPT: &str = r#"set -eu
root=$0 start=$1
shift
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmp "$root/tmp"
while [ "$1" != -- ]; do
  mkdir -p "$root$1"
  mount --bind "$1" "$root$1"
  shift
done
shift
exec chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$start" "$@"
"#;

/// Folders in which the root's programs lie.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub fn main(args: &Args) -> Result<()> {
    if fs::metadata("/proc/self").map_or(0, |own| own.uid()) != 0 {
        bail!("only root can make and enter a root file system; run cargo xtask root as root");
    }
    let cache = crate::target().join("vm").join(Arch::X86.debian());
    fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
    let cache = cache.canonicalize()?;
    let release = suites::release(&cache, &args.libc)?;
    tool("mmdebstrap", "mmdebstrap")?;
    let folder = cache.join(format!("root-{}", release.suite));
    let root = filled(&folder, |_, tree| make(&release, tree))?;
    install(&root, &args.packages)?;
    if args.prepare {
        println!("ready: {}", root.display());
        return Ok(());
    }
    let shell = [OsString::from("/bin/sh")];
    let command: &[OsString] = match &*args.command {
        [] => &shell,
        command => command,
    };
    enter(&root, command)
}

/// Makes the root file system by mmdebstrap, which verifies the packages by the archive's key.
fn make(release: &Release, tree: &Path) -> Result<()> {
    // mmdebstrap does not read this machine's settings of apt. These two decide whether the archive
    // can be used at all. mmdebstrap stores them in the root.
    let said = Command::new("apt-config")
        .args(["dump", "Acquire::Check-Valid-Until", "Acquire::http::Proxy"])
        .output()
        .context("cannot start apt-config, which tells this machine's settings of apt")?;
    let settings = String::from_utf8_lossy(&said.stdout).into_owned();
    let (archive, suite) = (&release.archive, &release.suite);
    let mut make = Command::new("mmdebstrap");
    make.args(["--mode=root", "--variant=minbase", "--quiet"]);
    make.args(settings.lines().map(|line| format!("--aptopt={line}")));
    make.arg(suite).arg(tree);
    crate::run(make.arg(format!("deb [signed-by={KEYRING}] {archive} {suite} main")))
}

/// Installs the packages that are missing in the root.
fn install(root: &Path, packages: &[String]) -> Result<()> {
    let list = |name: &String| root.join(format!("var/lib/dpkg/info/{name}.list"));
    let is_there = |name: &&String| {
        let ours = list(&format!("{name}:{}", Arch::X86.debian()));
        list(name).is_file() || ours.is_file()
    };
    let missing: Vec<_> = packages.iter().filter(|name| !is_there(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut command: Vec<OsString> = ["env", "DEBIAN_FRONTEND=noninteractive", "sh", "-c"]
        .map(OsString::from)
        .into();
    let script =
        r#"apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null"#;
    command.extend([script.into(), "sh".into()]);
    command.extend(missing.into_iter().map(OsString::from));
    // The name server of this machine may have changed since the root was made.
    let _ = fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf"));
    enter(root, &command).context("cannot install the packages in the root")
}

/// Runs a command in the root, in namespaces of its own for mounts and processes.
fn enter(root: &Path, command: &[OsString]) -> Result<()> {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into()));
    let here = std::env::current_dir()?;
    let target = fs::canonicalize(crate::target())?;
    let toolchain = [".rustup", ".cargo"].map(|name| home.join(name));
    let shown = [here.clone(), target].into_iter().chain(toolchain);
    let status = Command::new("unshare")
        .args(["--mount", "--propagation=private"])
        .args(["--pid", "--fork", "--kill-child"])
        .args(["sh", "-c", SCRIPT])
        .arg(root)
        .arg(&here)
        .args(shown.filter(|folder| folder.is_dir()))
        .arg("--")
        .args(command)
        .env("PATH", format!("{PATH}:{}/.cargo/bin", home.display()))
        .env("LANG", "C.UTF-8")
        .env_remove("TMPDIR")
        .status()
        .context("cannot start unshare")?;
    if !status.success() {
        bail!("the command in the root failed: {status}");
    }
    Ok(())
}
