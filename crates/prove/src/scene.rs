//! Puts a scenario into memory, runs it, and judges where it ends.

use crate::explore::{Outcome, explore};
use crate::image::{Image, Program};
use crate::ir::{Address, Alu, Instruction, Op, Order, Reg, Sets, Src};
use crate::kernel::UNREGISTERED;
use crate::machine::{
    AREA, Act, CPU_ID, Call, Cpu, Kind, Layout, MM_CID, Plan, RSEQ_CS, Rules, State, Thread,
    Violation, World, stack_top, thread_pointer,
};
use crate::spec::{self, CAPACITY, Operation, Ring, SLOT, Unit};
use anyhow::Result;
use std::collections::HashMap;

/// The first register that code outside the library loads to.
const NATIVE: usize = 20;
const TABLE: u64 = 0x10_0000;
const WORD: u64 = 64;
const TAIL: u64 = WORD + 64;
const SLOTS: u64 = WORD + 128;
const DATA: u64 = 0x80_0000;

fn unit_at(index: usize) -> u64 {
    0x30_0000 + index as u64 * 0x1000
}

/// Where a unit's stack ends: a multiple of 1024.
fn stack_end(index: usize) -> u64 {
    0x40_0400 + index as u64 * 0x400
}

fn stack_base(index: usize) -> u64 {
    stack_end(index) - 8 * CAPACITY as u64
}

/// Returns the address of an item. Its first word belongs to the list that it is in.
pub fn item(number: u64) -> u64 {
    0x50_0000 + number * 16
}

fn buffer_at(call: usize) -> u64 {
    0x60_0000 + call as u64 * 0x40
}

/// Returns the address of a gate of `add_gated`.
fn gate_at(is_open: bool) -> u64 {
    0x70_0000 + u64::from(is_open) * 8
}

/// A thread of a scenario.
#[derive(Clone)]
pub struct Actor {
    pub cpu: u8,
    pub operations: Vec<Operation>,
    pub handler: Option<Operation>,
}

/// What another CPU may see: if the first word is `when`, the other words are as told.
#[derive(Clone)]
pub struct Seen {
    pub first: Place,
    pub when: u64,
    pub then: Vec<(Place, u64)>,
}

#[derive(Clone, Copy)]
pub enum Place {
    /// A word of unit 0, by its offset.
    Unit(u64),
    At(u64),
}

impl Place {
    fn address(self) -> u64 {
        match self {
            Place::Unit(offset) => unit_at(0) + offset,
            Place::At(address) => address,
        }
    }
}

/// A word that the first thread sets before its operation.
pub const SET_BEFORE: Place = Place::At(DATA);

#[derive(Clone)]
pub struct Scenario {
    pub name: &'static str,
    /// What each CPU's unit holds, or `None` if it has none.
    pub units: Vec<Option<Unit>>,
    pub actors: Vec<Actor>,
    /// Another thread on the second CPU stops unit 0, fences, takes all, and resumes.
    pub takes: bool,
    /// Another thread on the second CPU reads.
    pub reads: Option<Seen>,
    pub budget: u8,
    pub cids: bool,
    pub offline: bool,
    pub unregistered: bool,
    pub storm: bool,
    pub stepped: bool,
}

/// What the checker knows of a built library.
pub struct Subject {
    pub image: Image,
    programs: HashMap<String, Program>,
    /// The addresses of the table's two entries for index 0.
    active: u64,
    home: u64,
}

impl Subject {
    /// Takes every section out of the library.
    ///
    /// # Errors
    ///
    /// If a function is missing, or has an instruction that the interpreter does not know.
    pub fn new(image: Image, names: &[&str]) -> Result<Subject> {
        let mut programs = HashMap::new();
        for name in names.iter().chain(&["stop", "resume"]) {
            let program = image.function(&format!("probe_{name}"))?;
            programs.insert((*name).to_owned(), program);
        }
        // `Units` is `repr(C)`: six words, and two arrays of `MAX_INDEX` entries. With another
        // layout, no operation would find its unit.
        let active = TABLE + 48;
        Ok(Subject {
            image,
            programs,
            active,
            home: active + 8 * pinfold_rseq::MAX_INDEX as u64,
        })
    }

    pub fn program(&self, name: &str) -> &Program {
        &self.programs[name]
    }
}

/// A scenario for one library and one set of rules. Mutants run in the same scene.
pub struct Scene<'a> {
    scenario: &'a Scenario,
    world: World<'a>,
    outcomes: std::collections::HashSet<spec::Final>,
    operations: Vec<Option<Operation>>,
    first: State,
}

impl<'a> Scene<'a> {
    /// Sets the scene. `mutant` takes the place of the section with the same name.
    ///
    /// # Errors
    ///
    /// If a thread does what it must not do before its section begins.
    pub fn new(
        subject: &'a Subject,
        rules: Rules,
        scenario: &'a Scenario,
        mutant: Option<&Program>,
        ones: bool,
    ) -> std::result::Result<Scene<'a>, Violation> {
        let mut making = Making {
            subject,
            rules,
            scenario,
            mutant,
            layout: Layout::default(),
            programs: Vec::new(),
            buffers: 0,
            ones,
        };
        let (plans, operations) = making.plans();
        making.memory(plans.len());
        let results_before: Vec<usize> = plans
            .iter()
            .scan(0, |sum, plan| {
                let before = *sum;
                *sum += plan.calls.len() + 1;
                Some(before)
            })
            .collect();
        let guarded = making.guarded();
        let live = making.programs.iter().map(|program| {
            let calls = plans
                .iter()
                .flat_map(|plan| plan.calls.iter().chain(&plan.handler));
            let results = calls.flat_map(|call| call.results.clone());
            program.live(results.fold(0, |all, register| all | 1 << register))
        });
        let live = live.collect();
        let world = World {
            live,
            image: &subject.image,
            rules,
            programs: making.programs,
            layout: making.layout,
            plans,
            results_before,
            guarded,
            has_cids: scenario.cids,
            cpus: scenario.units.len() as u8,
            storm: scenario.storm,
            stepped: scenario.stepped,
            may_go_offline: scenario.offline,
            ones,
        };
        let first = first_state(&world, scenario)?;
        let outcomes = expected(&world, scenario, &operations);
        Ok(Scene {
            scenario,
            world,
            outcomes,
            operations,
            first,
        })
    }

    /// Visits all states.
    pub fn run(&self) -> Outcome {
        explore(&self.world, self.first.clone(), &|state| self.judge(state))
    }

    /// Compares a final state with what the operations may lead to.
    fn judge(&self, state: &State) -> std::result::Result<(), Violation> {
        let word = |address| self.word(state, address);
        let mut units = Vec::new();
        for (index, unit) in self.scenario.units.iter().enumerate() {
            let read = unit.as_ref().map(|unit| read_unit(&word, index, unit));
            units.push(
                read.transpose()?
                    .map(|unit| meaning(&self.scenario.actors, unit)),
            );
        }
        let mut results = Vec::new();
        for (raw, operation) in state.results.iter().zip(&self.operations) {
            results.push(match (raw, operation) {
                (Some(raw), Some(Operation::Take)) => {
                    let taken = self.taken(state, raw)?;
                    Some(meaning_of_taken(&self.scenario.actors, taken))
                }
                (Some(raw), Some(operation)) => Some(operation.normal(raw)),
                _ => None,
            });
        }
        if let Some(seen) = &self.scenario.reads {
            let raw = state.results[*self.world.results_before.last().expect("a reader")].as_ref();
            let raw = raw.ok_or("the reader has no result")?;
            let then = seen.then.iter().zip(&raw[1..]);
            let wrong = raw[0] == seen.when && then.into_iter().any(|((_, a), b)| a != b);
            if wrong {
                return Err(format!(
                    "another CPU sees the commit, and with it {:x?}",
                    &raw[1..]
                ));
            }
        }
        if !self.outcomes.contains(&(results.clone(), units.clone())) {
            return Err(format!(
                "no order of the operations leads to {results:x?}, {units:x?}"
            ));
        }
        Ok(())
    }

    fn word(&self, state: &State, address: u64) -> std::result::Result<u64, Violation> {
        let found = self.world.layout.find(address);
        let (at, _) = found.ok_or_else(|| format!("a pointer to {address:#x}"))?;
        Ok(state.memory[usize::from(at)])
    }

    /// Returns what the taking thread took.
    fn taken(&self, state: &State, raw: &[u64]) -> std::result::Result<Vec<u64>, Violation> {
        let unit = self.scenario.units[0].as_ref().expect("a unit to take");
        if unit.stack.is_some() {
            let filled = raw[1].wrapping_sub(stack_base(0)) / 8;
            let items = raw
                .get(2..2 + filled as usize)
                .ok_or("a stack without bounds")?;
            return Ok([&raw[..1], items].concat());
        }
        if unit.list.is_some() {
            return walk(&|address| self.word(state, address), raw[0]);
        }
        Ok(raw.to_vec())
    }
}

/// Clears a word that has no meaning: what `store_two_if_equal` writes before its commit.
fn meaning(actors: &[Actor], mut unit: Unit) -> Unit {
    let operations = actors.iter().flat_map(|actor| &actor.operations);
    for operation in operations {
        if let Operation::StoreTwoIfEqual(_, new, _) = operation
            && unit.words[0] != *new
        {
            unit.words[1] = 0;
        }
    }
    unit
}

/// Does the same for the words that a thread took.
fn meaning_of_taken(actors: &[Actor], taken: Vec<u64>) -> Vec<u64> {
    let is_two = |operation: &Operation| matches!(operation, Operation::StoreTwoIfEqual(..));
    let mut operations = actors.iter().flat_map(|actor| &actor.operations);
    match taken[..] {
        [first, second] if operations.any(is_two) => {
            let unit = Unit {
                words: [first, second],
                ..Unit::default()
            };
            meaning(actors, unit).words.to_vec()
        }
        _ => taken,
    }
}

fn first_state(world: &World, scenario: &Scenario) -> std::result::Result<State, Violation> {
    let cpus = scenario.units.len();
    let mut state = State {
        memory: world.layout.initial.clone(),
        cpus: vec![
            Cpu {
                running: None,
                online: true,
                buffer: Vec::new(),
                interrupt: false,
            };
            cpus
        ],
        threads: Vec::new(),
        results: vec![None; world.plans.iter().map(|plan| plan.calls.len() + 1).sum()],
        budget: scenario.budget,
        owned: false,
        fencing: None,
    };
    for plan in &world.plans {
        state.threads.push(Thread {
            frames: Vec::new(),
            call: 0,
            cpu: plan.cpu,
            cid: plan.cpu,
            signalled: false,
            reserved: None,
        });
    }
    for (thread, plan) in world.plans.iter().enumerate() {
        let cpu = &mut state.cpus[usize::from(plan.cpu)];
        cpu.running = cpu.running.or(Some(thread as u8));
        world.begin(&mut state, thread, 0)?;
    }
    Ok(state)
}

fn expected(
    world: &World,
    scenario: &Scenario,
    operations: &[Option<Operation>],
) -> std::collections::HashSet<spec::Final> {
    let mut threads = Vec::new();
    let mut handlers = Vec::new();
    for (plan, before) in world.plans.iter().zip(&world.results_before) {
        let calls = plan.calls.len();
        threads.push((*before, operations[*before..before + calls].to_vec()));
        if let Some(operation) = &operations[before + calls] {
            handlers.push((before + calls, operation.clone()));
        }
    }
    let must_fail = scenario.unregistered || scenario.storm;
    let program = spec::Program {
        threads,
        handlers,
        results: operations.len(),
        may_fail: scenario.takes,
        must_fail,
        only_unit: (scenario.budget == 0 && !scenario.takes && scenario.actors.len() == 1)
            .then_some(0),
        // A fence aborts without being counted.
        losses: u64::from(scenario.budget) + u64::from(scenario.takes),
    };
    let outcomes = program.outcomes(scenario.units.clone());
    let clear = |unit: Option<Unit>| unit.map(|unit| meaning(&scenario.actors, unit));
    let take = operations
        .iter()
        .position(|operation| *operation == Some(Operation::Take));
    let outcomes = outcomes.into_iter();
    outcomes
        .map(|(mut results, units)| {
            if let Some(taken) = take.and_then(|take| results[take].as_mut()) {
                *taken = meaning_of_taken(&scenario.actors, std::mem::take(taken));
            }
            (results, units.into_iter().map(clear).collect())
        })
        .collect()
}

type Read<'a> = dyn Fn(u64) -> std::result::Result<u64, Violation> + 'a;

/// Reads a unit, which at first was `like`.
fn read_unit(word: &Read, index: usize, like: &Unit) -> std::result::Result<Unit, Violation> {
    let at = unit_at(index);
    let mut unit = Unit::default();
    if like.ring.is_some() {
        let (head, tail) = (word(at + WORD)?, word(at + TAIL)?);
        let mut ring = Ring {
            head,
            tail,
            records: Vec::new(),
        };
        let mut place = tail;
        while place < head && ring.records.len() < 4 {
            let slot = at + SLOTS + place % spec::RING;
            ring.records.push([word(slot)?, word(slot + 8)?]);
            place += SLOT;
        }
        unit.ring = Some(ring);
        return Ok(unit);
    }
    if like.shard.is_some() {
        let mut shard = [0; 4];
        for (offset, value) in shard.iter_mut().enumerate() {
            *value = word(at + WORD + 8 * offset as u64)?;
        }
        unit.shard = Some(shard);
        return Ok(unit);
    }
    unit.words = [word(at + WORD)?, word(at + WORD + 8)?];
    if like.list.is_some() {
        unit.list = Some(walk(word, unit.words[0])?);
        unit.words[0] = 0;
    }
    if is_stack(like) {
        let top = std::mem::take(&mut unit.words[0]);
        let (base, end) = (stack_base(index), stack_end(index));
        if word(base - 8)? != 0 {
            return Err("the stack's guard is not null".into());
        }
        if top == 0 && like.stack.is_none() {
            return Ok(unit);
        }
        if !(base..=end).contains(&top) || top % 8 != 0 {
            return Err(format!("the stack's top is {top:#x}"));
        }
        unit.stack = Some(
            (base..top)
                .step_by(8)
                .map(word)
                .collect::<std::result::Result<_, _>>()?,
        );
    }
    Ok(unit)
}

/// Returns whether the unit's first word is a stack, or 0 for no stack.
fn is_stack(unit: &Unit) -> bool {
    unit.stack.is_some() || (unit.words[0] == 0 && unit.list.is_none() && unit.ring.is_none())
}

fn walk(word: &Read, head: u64) -> std::result::Result<Vec<u64>, Violation> {
    let (mut items, mut at) = (Vec::new(), head);
    while at != 0 {
        items.push(at);
        if items.len() > 6 {
            return Err("the list is a circle".into());
        }
        at = word(at)?;
    }
    Ok(items)
}

/// A scene in the making.
struct Making<'a> {
    subject: &'a Subject,
    rules: Rules,
    scenario: &'a Scenario,
    mutant: Option<&'a Program>,
    layout: Layout,
    programs: Vec<Program>,
    buffers: usize,
    ones: bool,
}

type Plans = (Vec<Plan>, Vec<Option<Operation>>);

impl Making<'_> {
    /// Returns the threads' plans, and which operation each result belongs to.
    fn plans(&mut self) -> Plans {
        let mut plans = Vec::new();
        let mut operations = Vec::new();
        let scenario = self.scenario;
        for (thread, actor) in scenario.actors.iter().enumerate() {
            let mut calls = Vec::new();
            if thread == 0 && scenario.reads.is_some() {
                calls.push(self.native(&[], &[(DATA, 1)], Act::Run));
                operations.push(None);
            }
            for operation in &actor.operations {
                calls.push(self.call(operation));
                operations.push(Some(operation.clone()));
            }
            let handler = actor.handler.as_ref().map(|operation| self.call(operation));
            operations.push(actor.handler.clone());
            let cpu = actor.cpu;
            plans.push(Plan {
                cpu,
                calls,
                handler,
            });
        }
        if scenario.takes {
            let (loads, stores) = self.taking();
            let calls = vec![
                self.probe("stop", [TABLE, 0, 0, 0, 0, 0]),
                Call {
                    act: Act::Fence,
                    ..self.native(&[], &[(DATA, 0)], Act::Run)
                },
                self.native(&loads, &stores, Act::Run),
                Call {
                    act: Act::Release,
                    ..self.probe("resume", [TABLE, 0, 0, 0, 0, 0])
                },
            ];
            operations.extend([None, None, Some(Operation::Take), None, None]);
            plans.push(Plan {
                cpu: 1,
                calls,
                handler: None,
            });
        }
        if let Some(seen) = &scenario.reads {
            let loads = [seen.first]
                .into_iter()
                .chain(seen.then.iter().map(|(place, _)| *place));
            let loads: Vec<u64> = loads.map(Place::address).collect();
            operations.extend([None, None]);
            plans.push(Plan {
                cpu: 1,
                calls: vec![self.native(&loads, &[], Act::Run)],
                handler: None,
            });
        }
        (plans, operations)
    }

    /// Returns the words that a taking thread loads and stores, while unit 0 belongs to it.
    fn taking(&self) -> (Vec<u64>, Vec<(u64, u64)>) {
        let at = unit_at(0);
        let unit = self.scenario.units[0].as_ref().expect("a unit to take");
        let word = at + WORD;
        if unit.shard.is_some() {
            let words = [0, 8, 16, 24].map(|offset| word + offset);
            return (words.to_vec(), words.map(|word| (word, 0)).to_vec());
        }
        if unit.stack.is_some() {
            let slots = (0..CAPACITY as u64).map(|slot| stack_base(0) + 8 * slot);
            let loads = [word + 8, word].into_iter().chain(slots).collect();
            return (loads, vec![(word, stack_base(0)), (word + 8, 0)]);
        }
        if unit.list.is_some() {
            return (vec![word], vec![(word, 0)]);
        }
        let second = if unit.ring.is_some() {
            at + TAIL
        } else {
            word + 8
        };
        (vec![word, second], vec![(word, 0), (second, 0)])
    }

    /// Makes a call of code that is not in the library: loads, then plain stores. The first load is
    /// an acquire.
    fn native(&mut self, loads: &[u64], stores: &[(u64, u64)], act: Act) -> Call {
        let at = |address: u64| Address {
            offset: address as i64,
            ..Address::default()
        };
        let mut ops = Vec::new();
        for (register, load) in loads.iter().enumerate() {
            let order = if register == 0 {
                Order::Ordered
            } else {
                Order::Plain
            };
            ops.push(Op::Load {
                to: (NATIVE + register) as Reg,
                second: None,
                at: at(*load),
                bytes: 8,
                order,
            });
        }
        for (address, value) in stores {
            ops.push(Op::Store {
                from: Src::Imm(*value),
                second: None,
                at: at(*address),
                bytes: 8,
                order: Order::Plain,
            });
        }
        // Ends as a function does: with the stack pointer where it was before the call.
        let (stack, link) = (self.subject.image.arch.stack(), 50);
        let unstacked = stack_shift(&self.subject.image);
        let to_link = Op::Alu {
            op: Alu::Mov,
            to: Some(link),
            a: Src::Imm(0),
            b: Src::Imm(crate::ir::RETURN),
            bytes: 8,
            sets: Sets::Nothing,
            borrow: true,
        };
        let up = Op::Lea {
            to: stack,
            at: Address {
                base: Some(stack),
                offset: unstacked,
                ..Address::default()
            },
        };
        let last = vec![to_link, up, Op::Return { to: link }];
        let base = 0x1000 * (1 + self.programs.len() as u64);
        let ops = ops.into_iter().map(|op| vec![op]).chain([last]);
        let slots = ops.enumerate().map(|(at, ops)| Instruction {
            address: base + 4 * at as u64,
            length: 4,
            ops,
            text: String::new(),
        });
        let arch = self.subject.image.arch;
        let program = Program::new("native", arch, slots.collect(), base, None, 0);
        self.programs
            .push(program.expect("native code has a simple shape"));
        Call {
            program: self.programs.len() - 1,
            arguments: [0; 6],
            results: NATIVE..NATIVE + loads.len(),
            buffer: (0, 0),
            act,
        }
    }

    /// Makes a call of a function of the library.
    fn probe(&mut self, name: &str, arguments: [u64; 6]) -> Call {
        let known = self
            .programs
            .iter()
            .position(|program| program.name.ends_with(&format!("probe_{name}")));
        let program = known.unwrap_or_else(|| {
            let own = self.subject.program(name);
            let mutant = self.mutant.filter(|mutant| mutant.name == own.name);
            self.programs.push(mutant.unwrap_or(own).clone());
            self.programs.len() - 1
        });
        Call {
            program,
            arguments,
            results: 0..1,
            buffer: (0, 0),
            act: Act::Run,
        }
    }

    /// Makes the call of an operation.
    fn call(&mut self, operation: &Operation) -> Call {
        use Operation as Op;
        let buffer = buffer_at(self.buffers);
        let other = WORD + 8;
        let (arguments, words, input): (Vec<u64>, usize, Vec<u64>) = match operation {
            Op::Add(a) | Op::PopCounted(a) | Op::Push(a) => (vec![*a], 0, vec![]),
            Op::CountUp(a) | Op::CountDown(a) => (vec![*a], 0, vec![]),
            Op::Claim(token) => (vec![*token, buffer], 3, vec![]),
            Op::Store(a) | Op::And(a) | Op::Or(a) | Op::ListPush(a) => (vec![*a], 0, vec![]),
            Op::AddGated(n, is_open) => (vec![*n, gate_at(*is_open)], 0, vec![]),
            Op::StoreIfEqual(a, b) => (vec![*a, *b], 0, vec![]),
            Op::Pop | Op::ListPop => (vec![], 0, vec![]),
            Op::PopBatch(room) => (vec![buffer, *room], *room as usize, vec![]),
            Op::PushBatch(items) => (vec![buffer, items.len() as u64], 0, items.clone()),
            Op::FetchAdd(a) | Op::Swap(a) => (vec![*a, buffer], 1, vec![]),
            Op::CompareExchange(a, b) => (vec![*a, *b, buffer], 1, vec![]),
            Op::CompareExchangePair(a, b) => (vec![a[0], a[1], b[0], b[1]], 0, vec![]),
            Op::AddPair(n) => (n.to_vec(), 0, vec![]),
            Op::StoreTwoIfEqual(a, b, value) => (vec![*a, *b, other, *value], 0, vec![]),
            Op::StoreIfBothEqual(a, b, equal) => (vec![*a, *b, other, *equal], 0, vec![]),
            Op::Append(record) => (vec![spec::RING, buffer, 2, SLOT], 0, record.to_vec()),
            Op::Take => unreachable!("a taking thread has calls of its own"),
        };
        // A buffer ends with its last word, so that a section that goes beyond it is found.
        for word in 0..words.max(input.len()) {
            let value = input.get(word).copied().unwrap_or(0);
            self.layout
                .word(buffer + 8 * word as u64, Kind::Private, value);
        }
        self.buffers += 1;
        let mut all = [TABLE, WORD, 0, 0, 0, 0];
        all[2..2 + arguments.len()].copy_from_slice(&arguments);
        let mut call = self.probe(operation.name(), all);
        call.buffer = (buffer, words);
        call
    }

    /// Fills the memory.
    fn memory(&mut self, threads: usize) {
        let scenario = self.scenario;
        let index = if scenario.cids { MM_CID } else { CPU_ID };
        self.layout.word(TABLE, Kind::Fixed, AREA + RSEQ_CS);
        self.layout.word(TABLE + 8, Kind::Fixed, AREA + index);
        for (at, unit) in scenario.units.iter().enumerate() {
            let entry = unit.as_ref().map_or(0, |_| unit_at(at));
            self.layout
                .word(self.subject.active + 8 * at as u64, Kind::Shared, entry);
            self.layout
                .word(self.subject.home + 8 * at as u64, Kind::Fixed, entry);
            if let Some(unit) = unit {
                self.unit(at, unit);
            }
        }
        self.layout.word(DATA, Kind::Shared, 0);
        self.layout.word(gate_at(true), Kind::Fixed, WORD);
        self.layout.word(gate_at(false), Kind::Fixed, WORD + 1);
        // Every 1024th abort ends the operation on x86-64, and every 64th on Arm: soon.
        let soon = if scenario.storm && !scenario.stepped {
            1020
        } else {
            0
        };
        let aborts = self.subject.image.aborts;
        let shift = 8 * (aborts & 7);
        self.layout.word(aborts & !7, Kind::Private, soon << shift);
        let ids = match self.rules {
            Rules::Version1 => Kind::Private,
            Rules::Version2 | Rules::Arm619 => Kind::Fixed,
        };
        for thread in 0..threads {
            let at = thread_pointer(thread) + AREA;
            let cpu = match scenario.actors.get(thread) {
                Some(actor) => u64::from(actor.cpu),
                None => 1,
            };
            let id = if scenario.unregistered {
                UNREGISTERED
            } else {
                cpu << 32 | cpu
            };
            self.layout.word(at, ids, id);
            self.layout.word(at + RSEQ_CS, Kind::Private, 0);
            let cid = if scenario.unregistered {
                0xffff_ffff
            } else {
                cpu
            };
            self.layout.word(at + MM_CID, ids, cid);
            let levels = 1 + usize::from(
                scenario
                    .actors
                    .get(thread)
                    .is_some_and(|actor| actor.handler.is_some()),
            );
            for level in 0..levels {
                let top = stack_top(thread, level);
                let fill = if self.ones { 0x5a5a_5a5a_5a5a_5a5f } else { 0 };
                for word in (top - 0xd8..top).step_by(8) {
                    self.layout.word(word, Kind::Private, fill);
                }
            }
        }
    }

    fn unit(&mut self, index: usize, unit: &Unit) {
        let at = unit_at(index);
        let mut words = unit.words;
        if let Some(shard) = &unit.shard {
            for (word, value) in (at + WORD..).step_by(8).zip(shard) {
                self.layout.word(word, Kind::Shared, *value);
            }
            return;
        }
        if let Some(ring) = &unit.ring {
            self.layout.word(at + WORD, Kind::Shared, ring.head);
            self.layout.word(at + TAIL, Kind::Shared, ring.tail);
            for word in (0..spec::RING).step_by(8) {
                self.layout.word(at + SLOTS + word, Kind::Shared, 0);
            }
            for (record, place) in ring
                .records
                .iter()
                .zip((ring.tail..).step_by(SLOT as usize))
            {
                let slot = at + SLOTS + place % spec::RING;
                self.layout.word(slot, Kind::Shared, record[0]);
                self.layout.word(slot + 8, Kind::Shared, record[1]);
            }
            return;
        }
        if let Some(list) = &unit.list {
            words[0] = list.first().copied().unwrap_or(0);
            for (at, item) in list.iter().enumerate() {
                let next = list.get(at + 1).copied().unwrap_or(0);
                self.layout.word(*item, Kind::Shared, next);
            }
            // Items that threads may put on a list.
            for number in 5..8 {
                self.layout.word(item(number), Kind::Shared, 0x77);
            }
        }
        if is_stack(unit) {
            let base = stack_base(index);
            let items = unit.stack.clone().unwrap_or_default();
            self.layout.word(base - 8, Kind::Fixed, 0);
            for slot in 0..CAPACITY {
                let item = items.get(slot).copied().unwrap_or(0x99);
                self.layout.word(base + 8 * slot as u64, Kind::Shared, item);
            }
            words[0] = unit
                .stack
                .as_ref()
                .map_or(0, |items| base + 8 * items.len() as u64);
        }
        self.layout.word(at + WORD, Kind::Shared, words[0]);
        self.layout.word(at + WORD + 8, Kind::Shared, words[1]);
    }

    /// Returns the words of unit 0, and of its stack.
    fn guarded(&self) -> Vec<u16> {
        let stack = stack_base(0)..stack_end(0);
        let unit = unit_at(0)..unit_at(1);
        let addresses = unit.chain(stack).filter(|address| address % 8 == 0);
        addresses
            .filter_map(|address| self.layout.find(address))
            .map(|(at, _)| at)
            .collect()
    }
}

/// Returns how far the stack pointer rises when a function returns.
fn stack_shift(image: &Image) -> i64 {
    match image.arch {
        crate::image::Arch::X86 => 8,
        crate::image::Arch::Arm => 0,
    }
}
