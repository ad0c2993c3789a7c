//! `pinfold policy --check` and `pinfold migrate` on real nodes. Needs root, and the command in the
//! machine's `/bin`.

mod policy_machine;

use pinfold::mempolicy::{self, Mempolicy, Move, PageNode};
use pinfold::topology::{NodeId, Topology};
use policy_machine::{Pages, run_on, set};
use std::process::{Child, Command};

/// Returns the nodes with memory. With fewer than two, prints that the test is skipped and returns
/// `None`.
fn nodes() -> Option<Vec<usize>> {
    let nodes: Vec<_> = Topology::system().unwrap().with_memory.iter().collect();
    if nodes.len() < 2 {
        eprintln!("skipped: one node");
        return None;
    }
    Some(nodes)
}

/// Runs the command. Returns what it printed, and its exit status.
fn pinfold(words: &[&str]) -> (String, Option<i32>) {
    let output = Command::new("pinfold").args(words).output().unwrap();
    let mut text = String::from_utf8(output.stdout).unwrap();
    text += &String::from_utf8(output.stderr).unwrap();
    eprintln!("pinfold {}\n{text}", words.join(" "));
    (text, output.status.code())
}

/// A child that ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn own() -> String {
    std::process::id().to_string()
}

fn apply(pages: &Pages, policy: &Mempolicy) {
    mempolicy::apply(pages.at(0), pages.size(), policy, Move::No, false).unwrap();
}

/// Pages that were touched before their policy was set are found, and are at their place after
/// they were migrated.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn misplaced_pages_are_found_and_moved() {
    let Some(nodes) = nodes() else { return };
    let (a, b) = (nodes[0], nodes[1]);
    let bind = |node: usize| Mempolicy::bind(set(&[node])).unwrap();
    let pages = Pages::new(64);
    apply(&pages, &bind(a));
    pages.touch();
    let (text, code) = pinfold(&["policy", "--check", &own()]);
    assert!(code == Some(0) && text.contains("nothing misplaced"));
    apply(&pages, &bind(b));
    let (text, code) = pinfold(&["policy", "--check", &own()]);
    assert_eq!(code, Some(1));
    assert!(text.contains("64 pages (0.2 MiB) do not lie where their policy wants them"));
    let address = format!("{:x}", pages.at(0).addr());
    let line = text.lines().find(|line| line.contains(&address)).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    let (wanted, lies, policy) = (b.to_string(), format!("{a}:"), format!("bind:{b}"));
    assert_eq!(words[..6], [&*address, &wanted, "64", "4", &lies, "64"]);
    assert_eq!(words[6..], [&*policy, "anonymous"]);

    let (text, code) = pinfold(&["migrate", &own(), &a.to_string(), &b.to_string()]);
    assert!(code == Some(0) && text.contains("pages that could not be moved: 0"));
    assert_eq!(pages.nodes(), [NodeId(b); 64]);
    assert!(pages.unharmed());
    let (text, code) = pinfold(&["policy", "--check", &own()]);
    assert!(code == Some(0) && text.contains("nothing misplaced"));
}

/// Under an interleaving policy, only pages on other nodes than the policy's are misplaced.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn an_interleaving_policy_wants_its_nodes() {
    let Some(nodes) = nodes().filter(|nodes| nodes.len() > 2) else {
        return;
    };
    let pages = Pages::new(40);
    for mode in ["interleave", "interleave=relative", "prefer (many)=static"] {
        // The machine's nodes are 0 to 3, so positions and numbers are the same.
        let policy = Mempolicy::parse(&format!("{mode}:{}-{}", nodes[0], nodes[1])).unwrap();
        mempolicy::apply(pages.at(0), pages.size(), &policy, Move::Own, false).unwrap();
        pages.touch();
        assert_eq!(pinfold(&["policy", "--check", &own()]).1, Some(0), "{mode}");
        let list: Vec<_> = (0..5).map(|page| pages.at(page)).collect();
        let mut now = [PageNode::UNKNOWN; 5];
        let target = NodeId(nodes[2]);
        mempolicy::move_pages(&list, &[target; 5], &mut now, Move::Own).unwrap();
        let (text, code) = pinfold(&["policy", "--check", &own()]);
        assert_eq!(code, Some(1), "{mode}");
        assert!(text.contains("5 pages (0.0 MiB) do not lie"), "{mode}");
    }
}

/// A program without a policy that runs on one node's CPUs wants its memory there.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn memory_of_a_program_that_is_bound_to_a_nodes_cpus_belongs_there() {
    let Some(nodes) = nodes() else { return };
    let topology = Topology::system().unwrap();
    let (a, b) = (nodes[0].to_string(), nodes[1].to_string());
    let child = std::thread::scope(|scope| {
        let start = || {
            assert!(run_on(&topology, NodeId(nodes[1])));
            Command::new("sleep").arg("600").spawn().unwrap()
        };
        scope.spawn(start).join().unwrap()
    });
    let mut child = Ends(child);
    let pid = child.0.id().to_string();
    let (text, code) = pinfold(&["policy", "--check", &pid]);
    assert!(code == Some(0) && text.contains("nothing misplaced"));
    assert_eq!(pinfold(&["migrate", &pid, &b, &a]).1, Some(0));
    let (text, code) = pinfold(&["policy", "--check", &pid]);
    assert!(code == Some(1) && text.contains("do not lie where their policy wants them"));
    assert_eq!(pinfold(&["migrate", "--json", &pid, "all", &b]).1, Some(0));
    assert_eq!(pinfold(&["policy", "--check", &pid]).1, Some(0));
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let (text, code) = pinfold(&["migrate", &pid, &a, &b]);
    assert!(code == Some(2) && text.contains("there is no process"));
    let (text, code) = pinfold(&["migrate", &own(), "1023", &b]);
    assert!(code == Some(2) && text.contains("FROM: node 1023 is not there"));
}
