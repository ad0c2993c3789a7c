//! A subject in a process of its own, for a subject that needs its own environment variables.
//!
//! The parent sends a cell as a line of JSON and waits for a line with the timings. The child's
//! threads sleep between cells. So parent and child measure interleaved, as if they were one
//! process.

use crate::args::{Setup, SlabChildArgs};
use crate::runner::{Cell, Local, Runner};
use crate::subjects::{SubjectName, tcmalloc_is_percpu};
use anyhow::{Context, Result, ensure};
use pinfold_lab::Timing;
use std::io::{BufRead, BufReader, Write};
use std::process::{self, ChildStdin, ChildStdout, Command, Stdio};

/// The parent's side of a child process.
pub struct Child {
    subject: SubjectName,
    process: process::Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// Returns the command that starts this program again, with the environment that `subject` needs.
pub fn command(subject: SubjectName) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.envs(subject.environment());
    Ok(command)
}

impl Child {
    pub fn start(subject: SubjectName, setup: Setup) -> Result<Child> {
        let mut command = command(subject)?;
        command.args(["slab-child", "--subject", subject.name()]);
        command.args(["--warmup", &setup.warmup.to_string()]);
        if let Some(threads) = setup.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let questions = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().context("the child has no pipe")?);
        Ok(Child {
            subject,
            process,
            questions,
            answers,
        })
    }

    pub fn ask(&mut self, cell: Cell) -> Result<Vec<Timing>> {
        let question = serde_json::to_string(&cell)?;
        let pipe = self.questions.as_mut().context("the child has no pipe")?;
        writeln!(pipe, "{question}")
            .with_context(|| format!("the process of {} has ended", self.subject))?;
        let mut answer = String::new();
        let read = self.answers.read_line(&mut answer)?;
        ensure!(read > 0, "the process of {} has ended", self.subject);
        serde_json::from_str(&answer)
            .with_context(|| format!("the process of {} wrote {answer:?}", self.subject))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The closed pipe tells the child to end.
        self.questions = None;
        let _ = self.process.wait();
    }
}

/// Runs the child's side: answers until the parent closes the pipe.
pub fn serve(args: &SlabChildArgs) -> Result<()> {
    ensure_environment(args.subject)?;
    let pool = args.setup.pool()?;
    let mut runner = Local::new(args.subject, &pool);
    for question in std::io::stdin().lines() {
        let cell = serde_json::from_str(&question?)?;
        let answer = serde_json::to_string(&runner.measure(cell)?)?;
        println!("{answer}");
    }
    Ok(())
}

/// Fails if this process's environment does not make the subject what its name says.
pub fn ensure_environment(subject: SubjectName) -> Result<()> {
    match subject {
        SubjectName::TcmallocPercpu => ensure!(
            tcmalloc_is_percpu(),
            "tcmalloc's per-CPU mode does not work here"
        ),
        SubjectName::Tcmalloc if tcmalloc_is_percpu() => {
            eprintln!("note: in this process, tcmalloc uses its per-CPU mode by default");
        }
        _ => {}
    }
    Ok(())
}
