//! What the kernel may do between two instructions.

use crate::machine::thread_pointer;
use crate::machine::{AREA, Act, CPU_ID, MM_CID, RSEQ_CS, Rules, State, Violation, World};

/// One transition of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread runs one instruction.
    Step(u8),
    /// The kernel takes the CPU from a thread.
    Preempt(u8),
    /// The kernel moves a thread to another CPU.
    Migrate(u8, u8),
    /// A CPU begins to run a thread, with a concurrency id.
    Run(u8, u8, u8),
    /// A thread gets a signal, and its handler begins.
    Signal(u8),
    /// A CPU goes offline. Its threads move.
    Offline(u8),
    /// A store in a CPU's buffer becomes visible.
    Flush(u8, u8),
    /// A fence interrupts a CPU.
    Interrupt(u8),
    /// Another CPU takes the cache line that an exclusive load reserved.
    Lose(u8),
}

impl World<'_> {
    /// Returns every event that may happen next.
    pub fn events(&self, state: &State) -> Vec<Event> {
        let mut events = Vec::new();
        if let Some(thread) = self.local(state) {
            self.events_of(state, thread, &mut events);
            return events;
        }
        for cpu in 0..state.cpus.len() {
            for which in 0..state.cpus[cpu].buffer.len() {
                if self.may_flush(state, cpu, which) {
                    events.push(Event::Flush(cpu as u8, which as u8));
                }
            }
            if state.cpus[cpu].interrupt {
                events.push(Event::Interrupt(cpu as u8));
            }
        }
        for thread in 0..state.threads.len() {
            self.events_of(state, thread, &mut events);
        }
        events
    }

    /// Returns a running thread whose next instruction accesses no memory of other threads. The
    /// events of other threads may then wait, because they do not depend on that instruction. A
    /// fence may come before any instruction, so there is no such thread if a scenario has a fence.
    fn local(&self, state: &State) -> Option<usize> {
        let fences = |act: Act| act == Act::Fence;
        let mut calls = self.plans.iter().flat_map(|plan| &plan.calls);
        if calls.any(|call| fences(call.act)) {
            return None;
        }
        (0..state.threads.len()).find(|thread| {
            let frame = state.threads[*thread].frames.last();
            is_running(state, *thread) && frame.is_some_and(|frame| self.is_local(frame))
        })
    }

    fn events_of(&self, state: &State, thread: usize, events: &mut Vec<Event>) {
        let id = thread as u8;
        let at = &state.threads[thread];
        if at.is_done() {
            return;
        }
        let others = || {
            let cpus = (0..state.cpus.len()).filter(|cpu| *cpu != usize::from(at.cpu));
            cpus.filter(|cpu| state.cpus[*cpu].online)
        };
        if !is_running(state, thread) {
            if self.is_idle(state, usize::from(at.cpu)) {
                for cid in self.free_cids(state, thread) {
                    events.push(Event::Run(at.cpu, id, cid));
                }
            }
            if state.budget > 0 {
                events.extend(others().map(|cpu| Event::Migrate(id, cpu as u8)));
            }
            return;
        }
        if self.storm && self.is_inside(state, thread) {
            events.push(Event::Preempt(id));
            return;
        }
        if self.can_step(state, thread) {
            events.push(Event::Step(id));
        }
        if state.budget == 0 || self.storm {
            return;
        }
        events.push(Event::Preempt(id));
        events.extend(others().map(|cpu| Event::Migrate(id, cpu as u8)));
        if self.plans[thread].handler.is_some() && !at.signalled {
            events.push(Event::Signal(id));
        }
        if at.reserved.is_some() {
            events.push(Event::Lose(id));
        }
        if self.may_go_offline && others().next().is_some() {
            events.push(Event::Offline(at.cpu));
        }
    }

    /// Returns whether nothing holds up the thread's next instruction.
    fn can_step(&self, state: &State, thread: usize) -> bool {
        // The kernel ends a fence when each CPU has been interrupted.
        state.fencing != Some(thread as u8) || !state.cpus.iter().any(|cpu| cpu.interrupt)
    }

    fn is_idle(&self, state: &State, cpu: usize) -> bool {
        let running = state.cpus[cpu].running;
        running.is_none_or(|thread| state.threads[usize::from(thread)].is_done())
    }

    fn free_cids(&self, state: &State, thread: usize) -> Vec<u8> {
        if !self.has_cids {
            return vec![0];
        }
        let taken = |cid: u8| {
            (0..state.threads.len()).any(|other| {
                let same = state.threads[other].cid == cid;
                other != thread && same && is_running(state, other)
            })
        };
        (0..self.cpus).filter(|cid| !taken(*cid)).collect()
    }

    /// Returns whether the kernel would abort the thread.
    fn is_inside(&self, state: &State, thread: usize) -> bool {
        let frame = state.threads[thread].frames.last().expect("it runs");
        let ip = self.programs[usize::from(frame.program)].slots[usize::from(frame.slot)].address;
        let descriptor = state.memory[self.word(thread, RSEQ_CS)];
        let sections = self.programs.iter().filter_map(|program| program.section);
        let mut named = sections.filter(|section| section.at == descriptor);
        named.any(|section| (section.start..section.end).contains(&ip))
    }

    /// Returns the word of a thread's rseq area.
    fn word(&self, thread: usize, offset: u64) -> usize {
        let address = thread_pointer(thread) + AREA + (offset & !7);
        usize::from(
            self.layout
                .find(address)
                .expect("each thread has an area")
                .0,
        )
    }

    /// Performs an event.
    ///
    /// # Errors
    ///
    /// If a thread does what it must not do.
    pub fn perform(&self, state: &mut State, event: Event) -> Result<(), Violation> {
        let costs = matches!(
            event,
            Event::Preempt(_)
                | Event::Migrate(..)
                | Event::Signal(_)
                | Event::Offline(_)
                | Event::Lose(_)
        );
        if costs && !self.storm {
            state.budget -= 1;
        }
        match event {
            Event::Step(thread) => {
                let thread = usize::from(thread);
                let frame = state.threads[thread].frames.last().expect("it runs");
                let call = self.plans[thread].calls.get(usize::from(frame.call));
                if call.is_some_and(|call| call.act == Act::Fence) {
                    return self.fence(state, thread);
                }
                self.step(state, thread)
            }
            Event::Preempt(thread) if self.storm => self.interrupted(state, usize::from(thread)),
            Event::Preempt(thread) => {
                self.switch_out(state, usize::from(thread));
                Ok(())
            }
            Event::Migrate(thread, cpu) => {
                self.switch_out(state, usize::from(thread));
                state.threads[usize::from(thread)].cpu = cpu;
                Ok(())
            }
            Event::Run(cpu, thread, cid) => {
                state.cpus[usize::from(cpu)].running = Some(thread);
                self.switch_in(state, usize::from(thread), cid)
            }
            Event::Signal(thread) => {
                let thread = usize::from(thread);
                state.threads[thread].signalled = true;
                self.interrupted(state, thread)?;
                self.begin(state, thread, self.plans[thread].calls.len())
            }
            Event::Offline(cpu) => {
                let cpu = usize::from(cpu);
                let target = (0..state.cpus.len()).find(|at| *at != cpu && state.cpus[*at].online);
                let target = target.expect("one CPU stays online") as u8;
                for thread in 0..state.threads.len() {
                    if usize::from(state.threads[thread].cpu) == cpu {
                        self.switch_out(state, thread);
                        state.threads[thread].cpu = target;
                    }
                }
                state.cpus[cpu].online = false;
                state.cpus[cpu].running = None;
                Ok(())
            }
            Event::Lose(thread) => {
                state.threads[usize::from(thread)].reserved = None;
                Ok(())
            }
            Event::Flush(cpu, which) => {
                self.flush(state, usize::from(cpu), usize::from(which));
                Ok(())
            }
            Event::Interrupt(cpu) => {
                let cpu = usize::from(cpu);
                state.cpus[cpu].interrupt = false;
                self.drain(state, cpu);
                let running = state.cpus[cpu].running.map(usize::from);
                match running.filter(|thread| !state.threads[*thread].is_done()) {
                    Some(thread) => self.interrupted(state, thread),
                    None => Ok(()),
                }
            }
        }
    }

    /// `membarrier`: interrupts every other CPU, and goes on when each has been interrupted.
    fn fence(&self, state: &mut State, thread: usize) -> Result<(), Violation> {
        let own = usize::from(state.threads[thread].cpu);
        if state.fencing.is_none() {
            self.drain(state, own);
            state.fencing = Some(thread as u8);
            for cpu in 0..state.cpus.len() {
                state.cpus[cpu].interrupt = cpu != own;
            }
            return Ok(());
        }
        state.fencing = None;
        state.owned = true;
        self.finish(state, thread)
    }

    fn switch_out(&self, state: &mut State, thread: usize) {
        let cpu = usize::from(state.threads[thread].cpu);
        if state.cpus[cpu].running == Some(thread as u8) {
            // The scheduler has a full barrier.
            self.drain(state, cpu);
            state.cpus[cpu].running = None;
            state.threads[thread].reserved = None;
        }
    }

    /// Returns to user space after the thread was switched out.
    fn switch_in(&self, state: &mut State, thread: usize, cid: u8) -> Result<(), Violation> {
        state.threads[thread].cid = cid;
        let cpu = state.threads[thread].cpu;
        let changed = self.write_ids(state, thread, cpu, cid);
        if self.rules == Rules::Arm619 && !changed {
            return Ok(());
        }
        self.interrupted(state, thread)
    }

    /// Writes the ids. Returns whether they have changed.
    fn write_ids(&self, state: &mut State, thread: usize, cpu: u8, cid: u8) -> bool {
        let cpu_word = self.word(thread, CPU_ID);
        let cid_word = self.word(thread, MM_CID);
        let ids = [u64::from(cpu) << 32 | u64::from(cpu), u64::from(cid)];
        let old = [state.memory[cpu_word], state.memory[cid_word]];
        if old[0] == UNREGISTERED {
            return false;
        }
        state.memory[cpu_word] = ids[0];
        state.memory[cid_word] = ids[1];
        old != ids
    }

    /// Looks at `rseq_cs`: aborts the section in which the thread is.
    fn interrupted(&self, state: &mut State, thread: usize) -> Result<(), Violation> {
        state.threads[thread].reserved = None;
        let word = self.word(thread, RSEQ_CS);
        let descriptor = std::mem::take(&mut state.memory[word]);
        if descriptor == 0 || state.threads[thread].is_done() {
            return Ok(());
        }
        let frame = state.threads[thread].frames.last_mut().expect("it runs");
        let mut sections = self.programs.iter().filter_map(|program| program.section);
        let section = sections.find(|section| section.at == descriptor);
        let Some(section) = section else {
            return Err(format!(
                "rseq_cs is {descriptor:#x}, which is no descriptor"
            ));
        };
        let program = &self.programs[usize::from(frame.program)];
        let ip = program.slots[usize::from(frame.slot)].address;
        if (section.start..section.end).contains(&ip) {
            let abort = program.at(section.abort).ok_or("no abort handler")?;
            frame.slot = abort as u16;
            // A section that is aborted without end must still end.
            if !self.storm {
                frame.steps = 0;
            }
            self.forget(state, thread);
        }
        Ok(())
    }
}

/// What both ids of the CPU hold in a thread that is not registered.
pub const UNREGISTERED: u64 = 0xffff_ffff_0000_0000;

pub fn is_running(state: &State, thread: usize) -> bool {
    state.cpus[usize::from(state.threads[thread].cpu)].running == Some(thread as u8)
}
