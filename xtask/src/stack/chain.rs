//! The deepest chain of calls from a function.

use super::flow::{self, Call, Frame};
use super::image::{Image, Target};
use super::rules::Rules;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// A function on a chain of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub name: String,
    /// The bytes of stack that the function adds to the chain, its return address included.
    pub frame: u64,
}

/// The deepest chain from a function, that function first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    pub total: u64,
    pub links: Vec<Rc<Link>>,
}

/// Finds the deepest chains of a library.
pub struct Chains<'i> {
    image: &'i Image,
    rules: &'i Rules,
    frames: HashMap<u64, Rc<Frame>>,
    /// The deepest chain of each function.
    known: HashMap<u64, Rc<Chain>>,
    /// What no rule explains, in words.
    problems: BTreeSet<String>,
    /// The functions between the entry and the current function.
    path: Vec<u64>,
}

impl<'i> Chains<'i> {
    pub fn new(image: &'i Image, rules: &'i Rules) -> Self {
        Chains {
            image,
            rules,
            frames: HashMap::new(),
            known: HashMap::new(),
            problems: BTreeSet::new(),
            path: Vec::new(),
        }
    }

    /// Returns what the analysis has found so far and no rule explains: calls through a pointer,
    /// calls of unknown functions of another library, cycles, and code that moves the stack pointer
    /// in an unknown way. If there is any, a chain may be too short.
    pub fn problems(&self) -> &BTreeSet<String> {
        &self.problems
    }

    /// Returns the functions that any chain so far may pass through, each with the bytes of its own
    /// frame, the largest first.
    pub fn frames(&self) -> Vec<Link> {
        let link = |(start, frame): (&u64, &Rc<Frame>)| Link {
            name: self.image.name(*start),
            frame: frame.deepest,
        };
        let mut frames: Vec<Link> = self.frames.iter().map(link).collect();
        frames.sort_by(|a, b| b.frame.cmp(&a.frame).then_with(|| a.name.cmp(&b.name)));
        frames
    }

    /// Returns the deepest chain from the function at `start`.
    pub fn from(&mut self, start: u64) -> Rc<Chain> {
        if let Some(known) = self.known.get(&start) {
            return known.clone();
        }
        if let Some(at) = self.path.iter().position(|place| *place == start) {
            let names = self.path[at..].iter().map(|at| self.image.name(*at));
            let names = names.collect::<Vec<_>>().join(" -> ");
            self.problems
                .insert(format!("these calls form a cycle: {names}"));
            return Rc::new(Chain::default());
        }
        self.path.push(start);
        let frame = self.frame(start);
        let name = self.image.name(start);
        let link = |frame| {
            Rc::new(Link {
                name: name.clone(),
                frame,
            })
        };
        let mut best = Chain {
            total: frame.deepest,
            links: vec![link(frame.deepest)],
        };
        for call in &frame.calls {
            for below in self.called(&name, call) {
                let total = call.depth + below.total;
                if total > best.total {
                    let links = [link(call.depth)].into_iter();
                    best = Chain {
                        total,
                        links: links.chain(below.links.iter().cloned()).collect(),
                    };
                }
            }
        }
        self.path.pop();
        let best = Rc::new(best);
        self.known.insert(start, best.clone());
        best
    }

    fn frame(&mut self, start: u64) -> Rc<Frame> {
        if let Some(frame) = self.frames.get(&start) {
            return frame.clone();
        }
        let (image, rules) = (self.image, self.rules);
        let frame = flow::frame(image, &|target| ends(image, rules, target), start);
        let frame = frame.unwrap_or_else(|error| {
            self.problems.insert(format!("{error:#}"));
            Frame::default()
        });
        let frame = Rc::new(frame);
        self.frames.insert(start, frame.clone());
        frame
    }

    /// Returns the deepest chain of each function that a call may lead to.
    fn called(&mut self, caller: &str, call: &Call) -> Vec<Rc<Chain>> {
        let targets = match &call.target {
            Some(target) => vec![target.clone()],
            None => match self.rules.callees(caller) {
                Some(names) => self.named(names),
                None => {
                    let at = call.at;
                    let problem =
                        format!("no rule says what {caller} calls by a pointer at {at:#x}");
                    self.problems.insert(problem);
                    Vec::new()
                }
            },
        };
        let mut chains = Vec::new();
        for target in targets {
            match target {
                Target::Import(name) => match self.rules.cost(&name) {
                    Some(total) => chains.push(Rc::new(Chain {
                        total,
                        links: vec![Rc::new(Link { name, frame: total })],
                    })),
                    None => {
                        let problem =
                            format!("no rule says how much {name} uses, which {caller} calls");
                        self.problems.insert(problem);
                    }
                },
                Target::Own(start) => {
                    let name = self.image.name(start);
                    if !self.rules.excludes(&name) {
                        chains.push(self.from(start));
                    }
                }
            }
        }
        chains
    }

    fn named(&mut self, names: &[&str]) -> Vec<Target> {
        let mut targets = Vec::new();
        for name in names {
            let found = self.image.functions_named(name);
            if found.is_empty() && self.rules.cost(name).is_some() {
                targets.push(Target::Import((*name).to_owned()));
            } else if found.is_empty() {
                let problem = format!("a rule names {name}, which is not in the library");
                self.problems.insert(problem);
            }
            targets.extend(found.into_iter().map(Target::Own));
        }
        targets
    }
}

/// Returns whether a called function never returns.
pub fn ends(image: &Image, rules: &Rules, target: &Target) -> bool {
    match target {
        Target::Own(start) => rules.ends(&image.name(*start)),
        Target::Import(name) => rules.ends(name),
    }
}
