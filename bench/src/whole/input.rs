//! Generates the input of the real programs, from fixed seeds.

use super::launch;
use super::prepare::Cache;
use super::programs::installed;
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::process::{Command, Stdio};

/// xorshift64 (Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % most
    }
}

/// Returns C code with `functions` functions of loops, switches, structures and calls.
pub fn c_source(functions: usize) -> String {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut text = String::from(
        "typedef unsigned long word;\nstruct item { word key, count; struct item *next; double weight; };\n",
    );
    for function in 0..functions {
        let _ = writeln!(
            text,
            "word f{function}(word a, word b, struct item *list, int *table) {{\n  word sum = a;\n  double scale = 1.0;"
        );
        for step in 0..12 {
            let (x, y) = (random.below(1000), random.below(63) + 1);
            let _ = match random.below(5) {
                0 => writeln!(
                    text,
                    "  for (word i = 0; i < b + {y}; i++) {{ sum += (i * {x}) ^ (sum >> {y}); table[i & 63] += (int)sum; }}"
                ),
                1 => writeln!(
                    text,
                    "  for (struct item *at = list; at; at = at->next) if (at->key % {y} == a % {y}) {{ sum += at->count; scale *= at->weight + {x}; }}"
                ),
                2 => {
                    let _ = writeln!(text, "  switch ((sum ^ {x}) & 15) {{");
                    for case in 0..12 {
                        let _ = writeln!(
                            text,
                            "    case {case}: sum = sum * {} + table[{}]; {}",
                            random.below(99) + 1,
                            random.below(64),
                            if case % 3 == 0 { "break;" } else { "" }
                        );
                    }
                    writeln!(text, "  }}")
                }
                3 if function > 0 => writeln!(
                    text,
                    "  if (sum > {x}) sum ^= f{}(sum + {step}, b >> 1, list, table);",
                    random.below(function as u64)
                ),
                _ => writeln!(
                    text,
                    "  {{ word t[{y}]; for (int i = 0; i < {y}; i++) t[i] = sum + i * a; sum ^= t[(sum + {x}) % {y}]; }}"
                ),
            };
        }
        text += "  return sum + (word)scale;\n}\n";
    }
    text
}

/// Returns formulas in SMT-LIB: pigeonholes, a product of bit vectors to factor, and ordered
/// integers.
pub fn formulas() -> String {
    let mut text =
        String::from("(set-option :smt.random_seed 1)\n(set-option :sat.random_seed 1)\n");
    // More pigeons than holes: unsatisfiable, and laborious to prove.
    let holes = 7;
    text += "(push)\n";
    for pigeon in 0..=holes {
        for hole in 0..holes {
            let _ = writeln!(text, "(declare-const p{pigeon}_{hole} Bool)");
        }
        let any: Vec<_> = (0..holes).map(|hole| format!("p{pigeon}_{hole}")).collect();
        let _ = writeln!(text, "(assert (or {}))", any.join(" "));
    }
    for hole in 0..holes {
        for one in 0..=holes {
            for other in 0..one {
                let _ = writeln!(
                    text,
                    "(assert (or (not p{one}_{hole}) (not p{other}_{hole})))"
                );
            }
        }
    }
    text += "(check-sat)\n(pop)\n";
    // Find two factors of a product.
    for product in [0x3f_5b1d_u64, 0x7a_4c35] {
        let _ = writeln!(
            text,
            "(push)\n(declare-const a (_ BitVec 24))\n(declare-const b (_ BitVec 24))\n(assert (= (bvmul a b) (_ bv{product} 24)))\n(assert (bvugt a (_ bv255 24)))\n(assert (bvugt b (_ bv255 24)))\n(assert (bvult a (_ bv4096 24)))\n(assert (bvult b (_ bv4096 24)))\n(check-sat)\n(pop)"
        );
    }
    // Many integers, each constrained against some others.
    let mut random = Random(0x1234_5678_9abc_def1);
    text += "(push)\n";
    let count = 700;
    for at in 0..count {
        let _ = writeln!(
            text,
            "(declare-const x{at} Int)\n(assert (and (> x{at} 0) (< x{at} 20000)))"
        );
    }
    for at in 1..count {
        for _ in 0..3 {
            let (other, most) = (random.below(at), random.below(40) + 1);
            let _ = writeln!(
                text,
                "(assert (or (< (+ x{at} {most}) x{other}) (< (+ x{other} {most}) x{at})))"
            );
        }
    }
    text += "(check-sat)\n(pop)\n";
    text
}

/// Makes a bare repository with a long history of growing and changing files.
pub fn history(cache: &Cache) -> Result<()> {
    let repository = cache.input.join("history.git");
    if repository.join("made").is_file() {
        return Ok(());
    }
    let _ = fs::remove_dir_all(&repository);
    let path = repository
        .to_str()
        .context("the cache folder's path is not UTF-8; give another --cache")?;
    launch::helper("git", &["init", "--quiet", "--bare", path])?;
    let stream = cache.write_input("history.stream", &history_stream())?;
    let status = Command::new(installed("git")?)
        .args(["-C", path, "fast-import", "--quiet"])
        .stdin(File::open(stream)?)
        .stdout(Stdio::null())
        .status()?;
    ensure!(status.success(), "git fast-import failed: {status}");
    fs::write(repository.join("made"), "")?;
    Ok(())
}

fn history_stream() -> String {
    let mut random = Random(0xdead_beef_cafe_f00d);
    let mut files: Vec<Vec<String>> = (0..60)
        .map(|_| (0..150).map(|_| line(&mut random)).collect())
        .collect();
    let mut text = String::new();
    for commit in 0..450_u64 {
        let message = format!("change {commit}\n");
        let _ = write!(
            text,
            "commit refs/heads/main\ncommitter A <a@example.org> {} +0000\ndata {}\n{message}",
            1_700_000_000 + commit * 60,
            message.len()
        );
        for _ in 0..3 {
            let at = random.below(files.len() as u64) as usize;
            for _ in 0..5 {
                let place = random.below(files[at].len() as u64) as usize;
                let fresh = line(&mut random);
                if random.below(3) == 0 {
                    files[at].insert(place, fresh);
                } else {
                    files[at][place] = fresh;
                }
            }
            let contents = files[at].concat();
            let _ = writeln!(
                text,
                "M 100644 inline d{}/f{at}.txt\ndata {}\n{contents}",
                at % 6,
                contents.len()
            );
        }
    }
    text
}

fn line(random: &mut Random) -> String {
    let words: Vec<_> = (0..6)
        .map(|_| format!("w{:x}", random.below(5000)))
        .collect();
    words.join(" ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_the_same_every_time() {
        assert_eq!(c_source(5), c_source(5));
        assert_eq!(formulas(), formulas());
        assert_eq!(history_stream(), history_stream());
    }

    #[test]
    fn brackets_match() {
        for (text, open, close) in [(c_source(20), '{', '}'), (formulas(), '(', ')')] {
            assert_eq!(text.matches(open).count(), text.matches(close).count());
        }
    }
}
