//! `pinfold bench all` in short runs: the report as a file and as text. The tests do not judge
//! speed.

mod runs;

use quick_xml::Reader;
use quick_xml::events::Event;
use runs::*;
use std::fs;
use std::path::Path;

const PARTS: [&str; 5] = ["vmstat", "slab", "jitter", "counter", "pft"];

/// Checks that a page is well-formed, and that it loads nothing. Returns the names of its elements
/// and the ids of its sections.
fn elements(html: &str) -> (Vec<String>, Vec<String>) {
    let (mut names, mut sections) = (Vec::new(), Vec::new());
    let mut reader = Reader::from_str(html);
    reader.config_mut().check_end_names = true;
    let mut depth = 0;
    loop {
        let event = reader.read_event().expect("well-formed");
        let element = match &event {
            Event::Eof => break,
            Event::End(_) => {
                depth -= 1;
                continue;
            }
            Event::Start(element) => {
                depth += 1;
                element
            }
            Event::Empty(element) => element,
            Event::GeneralRef(entity) => {
                let entity = String::from_utf8_lossy(entity).into_owned();
                assert!(
                    ["amp", "lt", "gt", "quot", "#39"].contains(&&entity[..]),
                    "&{entity};"
                );
                continue;
            }
            _ => continue,
        };
        let name = String::from_utf8(element.name().as_ref().to_vec()).unwrap();
        for attribute in element.attributes() {
            let attribute = attribute.expect("well-formed attributes");
            let key = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
            let value = String::from_utf8_lossy(&attribute.value).into_owned();
            if name == "section" && key == "id" {
                sections.push(value.clone());
            }
            let loads = ["src", "srcset", "href", "xlink:href", "data", "poster"];
            let is_loaded = loads.contains(&&key[..]) && !value.starts_with('#');
            assert!(!is_loaded && !key.starts_with("on"), "{name} {key}={value}");
        }
        names.push(name);
    }
    assert_eq!(depth, 0, "every element ends");
    (names, sections)
}

fn only_file_in(folder: &Path) -> String {
    let files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].to_string_lossy().into_owned()
}

#[test]
fn a_report_is_one_file_that_needs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report <&>.html");
    fs::write(&file, "old").unwrap();
    let out = bench("all --quick --html").arg(&file).output().unwrap();
    let (said, errors) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert_eq!(out.status.code(), Some(0), "{errors}");
    assert!(said.contains(" of 5 benchmarks are in "), "{said}");
    assert!(!errors.contains(" % "), "no progress in a pipe: {errors}");
    assert_eq!(only_file_in(folder.path()), "report <&>.html");
    let html = fs::read_to_string(&file).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>\n"));
    let (names, sections) = elements(&html);
    assert_eq!(sections, PARTS);
    for loading in ["script", "link", "img", "iframe", "object"] {
        assert!(!names.iter().any(|name| name == loading), "{loading}");
    }
    assert!(!html.contains("url(") && !html.contains("@import"));
    // Two plots where the document has comparable ones, else one.
    let plots = names.iter().filter(|name| *name == "svg").count();
    assert_eq!(plots, if cpus() > 1 { 8 } else { 7 });
    for words in [
        "prefers-color-scheme: dark",
        "@media print",
        "This run had --quick",
        "<td>49 / 62 / 68</td>",
        "<td>134.5</td>",
        "<td>128615 / 865516</td>",
        "181041 / 181000",
        "about 200,000",
        "per-CPU memory by",
        "memory nodes",
    ] {
        assert!(html.contains(words), "{words}: {html}");
    }
    // Each figure of this machine that a meaning names was found among the rows.
    for line in html
        .lines()
        .filter(|line| line.contains("class=\"meaning\""))
    {
        assert!(!line.contains(" - "), "{line}");
    }
}

#[test]
fn without_a_file_the_tables_are_printed() {
    let text = output("all --quick --seconds 0.1");
    for words in [
        "Incrementing a counter of the CPU\n=",
        "$ pinfold bench vmstat --rounds 5 --calls 1000\n",
        "$ pinfold bench slab --subject pinfold-cache,",
        "Single thread testing",
        "$ pinfold bench counter --processes 16 --amount 32768 --rounds 1 --seconds 0.2\n",
        "16 processes, amount 32768, mmap, no sums",
        "\t\tanon+vma-policy\n",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("<section"));
}

#[test]
fn a_benchmark_that_cannot_run_says_why_and_the_others_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.html");
    let line = format!("all --quick --html {}", file.display());
    let one_cpu = std::thread::scope(|scope| {
        let run = || {
            on_one_cpu();
            output(&line)
        };
        scope.spawn(run).join().unwrap()
    });
    assert!(
        one_cpu.starts_with("4 of 5 benchmarks are in "),
        "{one_cpu}"
    );
    let html = fs::read_to_string(&file).unwrap();
    assert_eq!(elements(&html).1, PARTS);
    let jitter = html.split("<section id=\"jitter\">").nth(1).unwrap();
    let jitter = jitter.split("</section>").next().unwrap();
    for words in [
        "Not measured here: this process may use only CPU ",
        "about 200,000",
    ] {
        assert!(jitter.contains(words), "{words}: {jitter}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("none/report.html");
    let cases = [
        (missing.to_str().unwrap(), "folder that you may write to"),
        (folder.path().to_str().unwrap(), "not a regular file"),
    ];
    for (file, why) in cases {
        // An hour for each setup: a run that measured first would not end.
        refused(&format!("all --seconds 3600 --html {file}"), &[why, file]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    for seconds in ["0", "-1", "nan", "4000"] {
        refused(
            &format!("all --seconds {seconds}"),
            &["give a number from 0.05 to 3600"],
        );
    }
}

#[test]
fn a_link_to_a_file_stays_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (
        folder.path().join("report.html"),
        folder.path().join("link"),
    );
    fs::write(&file, "old").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    output(&format!(
        "all --quick --seconds 0.05 --html {}",
        link.display()
    ));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read_to_string(&file).unwrap().ends_with("</html>\n"));
}

fn cpus() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

/// Lets this thread and the programs that it starts run on one CPU only.
fn on_one_cpu() {
    // SAFETY: zeroes are a valid, empty set; both calls touch only this set and this thread.
    let pinned = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(pinned, 0, "{}", std::io::Error::last_os_error());
}
