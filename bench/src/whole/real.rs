//! Real programs: what each needs, its input, and how it is started.

use super::input;
use super::launch;
use super::prepare::{self, Cache};
use super::programs::Threads;
use super::redis;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;

/// A program of the system.
pub struct Real {
    pub name: &'static str,
    pub what: &'static str,
    pub threads: Threads,
    /// The programs that it needs, and the Debian packages that contain them.
    pub tools: &'static [(&'static str, &'static str)],
    /// Makes the program's input, unless it exists.
    pub prepare: fn(&Cache) -> Result<()>,
    /// Runs before each run. Not timed.
    pub before: Option<fn(&Cache) -> Result<()>>,
    /// Returns how the program is started, with the given number of threads.
    pub call: fn(&Cache, u32) -> Result<Call>,
}

impl fmt::Debug for Real {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name)
    }
}

/// The start of a program.
#[derive(Debug, Default)]
pub struct Call {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// The file for standard input.
    pub input: Option<PathBuf>,
    pub environment: Vec<(&'static str, &'static str)>,
    /// The id of the user to run as. `None` means this process's user.
    pub user: Option<u32>,
}

impl Call {
    /// Starts `program` without arguments.
    pub fn of(program: PathBuf) -> Call {
        Call {
            program,
            ..Call::default()
        }
    }

    /// Starts an installed program.
    pub fn tool(name: &str, arguments: &[&str]) -> Result<Call> {
        let program =
            prepare::tool(name).with_context(|| format!("there is no {name}; install it"))?;
        Ok(Call {
            program,
            arguments: arguments.iter().map(OsString::from).collect(),
            ..Call::default()
        })
    }

    /// Adds an input file as the last argument.
    fn reading(mut self, cache: &Cache, name: &str) -> Call {
        self.arguments.push(cache.input.join(name).into());
        self
    }

    /// Makes an input file the standard input.
    fn fed(mut self, cache: &Cache, name: &str) -> Call {
        self.input = Some(cache.input.join(name));
        self
    }
}

pub const ALL: &[Real] = &[
    Real {
        name: redis::NAME,
        what: "redis-server, filled and queried by redis-benchmark; seconds are those of the requests",
        threads: Threads::One,
        tools: &[
            ("redis-server", "redis-server"),
            ("redis-benchmark", "redis-tools"),
            ("redis-cli", "redis-tools"),
        ],
        prepare: |_| Ok(()),
        before: None,
        call: redis::server,
    },
    Real {
        name: "sqlite3",
        what: "inserts, indexes, joins and groups in memory",
        threads: Threads::One,
        tools: &[("sqlite3", "sqlite3")],
        prepare: |cache| {
            text(
                cache,
                "sqlite.sql",
                include_str!("../../programs/sqlite.sql"),
            )
        },
        before: None,
        call: |cache, _| {
            Ok(Call::tool("sqlite3", &["-batch", ":memory:"])?.fed(cache, "sqlite.sql"))
        },
    },
    Real {
        name: "python3",
        what: "objects, strings and dictionaries; small objects come from Python's own allocator",
        threads: Threads::One,
        tools: &[("python3", "python3")],
        prepare: |cache| {
            text(
                cache,
                "objects.py",
                include_str!("../../programs/objects.py"),
            )
        },
        before: None,
        call: python,
    },
    Real {
        name: "python3-malloc",
        what: "the same as python3 with PYTHONMALLOC=malloc, which takes small objects from malloc",
        threads: Threads::One,
        tools: &[("python3", "python3")],
        prepare: |cache| {
            text(
                cache,
                "objects.py",
                include_str!("../../programs/objects.py"),
            )
        },
        before: None,
        call: |cache, threads| {
            let mut call = python(cache, threads)?;
            call.environment.push(("PYTHONMALLOC", "malloc"));
            Ok(call)
        },
    },
    Real {
        name: "gcc",
        what: "compiles generated C with -O2; memory is that of the compiler process, cc1",
        threads: Threads::One,
        tools: &[("gcc", "gcc")],
        prepare: |cache| text(cache, "gcc.c", &input::c_source(50)),
        before: None,
        call: |cache, _| {
            Ok(Call::tool("gcc", &["-O2", "-w", "-S", "-o", "-"])?.reading(cache, "gcc.c"))
        },
    },
    Real {
        name: "clang",
        what: "compiles generated C with -O2",
        threads: Threads::One,
        tools: &[("clang", "clang")],
        prepare: |cache| text(cache, "clang.c", &input::c_source(45)),
        before: None,
        call: |cache, _| {
            Ok(Call::tool("clang", &["-O2", "-w", "-S", "-o", "-"])?.reading(cache, "clang.c"))
        },
    },
    Real {
        name: "z3",
        what: "proves and refutes generated formulas about bit vectors and integers",
        threads: Threads::One,
        tools: &[("z3", "z3")],
        prepare: |cache| text(cache, "formulas.smt2", &input::formulas()),
        before: None,
        call: |cache, _| Ok(Call::tool("z3", &["-smt2"])?.reading(cache, "formulas.smt2")),
    },
    Real {
        name: "ghostscript",
        what: "renders generated pages of text, curves and shades",
        threads: Threads::One,
        tools: &[("gs", "ghostscript")],
        prepare: |cache| text(cache, "pages.ps", include_str!("../../programs/pages.ps")),
        before: None,
        call: |cache, _| {
            let arguments = [
                "-q",
                "-dNOPAUSE",
                "-dBATCH",
                "-dSAFER",
                "-sDEVICE=pnggray",
                "-r200",
                "-sOutputFile=-",
            ];
            Ok(Call::tool("gs", &arguments)?.reading(cache, "pages.ps"))
        },
    },
    Real {
        name: "lua",
        what: "trees, tables and strings",
        threads: Threads::One,
        tools: &[("lua5.4", "lua5.4")],
        prepare: |cache| {
            text(
                cache,
                "objects.lua",
                include_str!("../../programs/objects.lua"),
            )
        },
        before: None,
        call: |cache, _| Ok(Call::tool("lua5.4", &[])?.reading(cache, "objects.lua")),
    },
    Real {
        name: "ruby",
        what: "strings, arrays and hashes",
        threads: Threads::One,
        tools: &[("ruby", "ruby")],
        prepare: |cache| {
            text(
                cache,
                "objects.rb",
                include_str!("../../programs/objects.rb"),
            )
        },
        before: None,
        call: |cache, _| Ok(Call::tool("ruby", &["--disable-gems"])?.reading(cache, "objects.rb")),
    },
    Real {
        name: "node",
        what: "objects, buffers and compression; objects come from the engine's own heap",
        threads: Threads::One,
        tools: &[("node", "nodejs")],
        prepare: |cache| {
            text(
                cache,
                "objects.js",
                include_str!("../../programs/objects.js"),
            )
        },
        before: None,
        call: |cache, _| Ok(Call::tool("node", &[])?.reading(cache, "objects.js")),
    },
    Real {
        name: "git-gc",
        what: "git gc of a generated history; memory is that of its largest process",
        threads: Threads::Asked,
        tools: &[("git", "git")],
        prepare: input::history,
        before: Some(|cache| {
            let copy = cache.work.join("gc.git");
            let _ = fs::remove_dir_all(&copy);
            let from = cache.input.join("history.git");
            launch::helper("cp", &["-r".as_ref(), from.as_os_str(), copy.as_os_str()])?;
            Ok(())
        }),
        call: |cache, threads| {
            let threads = format!("pack.threads={threads}");
            let mut call = Call::tool("git", &["-c", "gc.autoDetach=false", "-c", &threads, "-C"])?;
            call.arguments.push(cache.work.join("gc.git").into());
            call.arguments
                .extend(["gc", "--aggressive", "--prune=now", "--quiet"].map(OsString::from));
            Ok(call)
        },
    },
    Real {
        name: "postgres",
        what: "one backend: inserts, indexes, joins, JSON and sorts",
        threads: Threads::One,
        tools: &[("postgres", "postgresql"), ("initdb", "postgresql")],
        prepare: database,
        before: None,
        call: |cache, _| {
            let mut call = Call::tool("postgres", &["--single", "-j", "-c", "fsync=off", "-D"])?;
            call.arguments.push(cache.input.join("postgres").into());
            call.arguments.push("postgres".into());
            call.user = postgres_user();
            Ok(call.fed(cache, "postgres.sql"))
        },
    },
];

fn text(cache: &Cache, name: &str, text: &str) -> Result<()> {
    cache.write_input(name, text)?;
    Ok(())
}

fn python(cache: &Cache, _threads: u32) -> Result<Call> {
    let mut call = Call::tool("python3", &["-s"])?.reading(cache, "objects.py");
    // Python's hashes depend on this seed. The output must be the same in every run.
    call.environment.push(("PYTHONHASHSEED", "0"));
    Ok(call)
}

/// Returns the user to run PostgreSQL as, because it refuses to run as root.
fn postgres_user() -> Option<u32> {
    const NOBODY: u32 = 65534;
    // SAFETY: the call takes no arguments and touches no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    is_root.then_some(NOBODY)
}

/// Makes an empty database cluster, and the file of its statements.
fn database(cache: &Cache) -> Result<()> {
    text(
        cache,
        "postgres.sql",
        include_str!("../../programs/postgres.sql"),
    )?;
    let folder = cache.input.join("postgres");
    if folder.join("made").is_file() {
        return Ok(());
    }
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder)?;
    let initdb = prepare::tool("initdb").context("there is no initdb; install postgresql")?;
    let options = [
        "--no-sync",
        "--no-locale",
        "--encoding=UTF8",
        "--username=postgres",
    ];
    let mut arguments = Vec::new();
    let tool = if let Some(user) = postgres_user() {
        chown(&folder, Some(user), Some(user))?;
        let user = user.to_string();
        arguments.extend([
            format!("--reuid={user}"),
            format!("--regid={user}"),
            "--clear-groups".to_owned(),
        ]);
        arguments.push(initdb.display().to_string());
        "setpriv"
    } else {
        "initdb"
    };
    arguments.extend(options.map(str::to_owned));
    arguments.extend(["-D".to_owned(), folder.display().to_string()]);
    launch::helper(tool, &arguments)?;
    fs::write(folder.join("made"), "")?;
    Ok(())
}
