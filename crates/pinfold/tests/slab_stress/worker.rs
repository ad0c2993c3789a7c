//! A thread of the stress test, which does random operations.

use super::*;

pub struct Worker<'w> {
    pub world: &'w World,
    pub random: Random,
    pub held: Vec<(usize, Held)>,
}

impl Worker<'_> {
    pub fn below(&mut self, n: usize) -> usize {
        self.random.below(n as u64) as usize
    }

    pub fn tag(&mut self) -> u64 {
        self.random.below(1 << 40) | 1 << 50
    }

    pub fn run(&mut self) {
        while !self.world.stop.load(Relaxed) {
            for _ in 0..64 {
                self.step();
            }
            self.world.operations.fetch_add(64, Relaxed);
        }
        doing(&"free all");
        while let Some((of, held)) = self.held.pop() {
            self.world.stores[of].free(held);
        }
        doing(&"nothing: it has ended");
    }

    pub fn step(&mut self) {
        let (what, step): (&'static &'static str, fn(&mut Self)) = match self.below(1000) {
            0..350 => (&"alloc", Self::alloc),
            350..700 => (&"free", Self::free),
            700..760 => (&"many", Self::many),
            760..800 => (&"prefilled", Self::prefilled),
            800..850 => (&"pooled", Self::pooled),
            850..900 => (&"hand on", Self::hand_on),
            900..985 => (&"readers", Self::readers),
            985..995 => (&"pin", |this| pin(this.below(64))),
            995..999 => (&"look on", Self::look_on),
            _ => (&"disturb", Self::disturb),
        };
        doing(what);
        step(self);
    }

    pub fn alloc(&mut self) {
        if self.held.len() >= HELD {
            return self.free();
        }
        let of = self.below(KINDS.len());
        let cache = &self.world.stores[of].cache;
        let node = self.below(2);
        let object = match self.below(8) {
            0 => cache.alloc_node(node),
            1 => cache.alloc_node_exact(node).or_else(|| cache.alloc()),
            _ => cache.alloc(),
        };
        self.keep(of, object);
    }

    pub fn keep(&mut self, of: usize, object: Option<NonNull<u8>>) {
        let object = object.expect("memory");
        let tag = self.tag();
        self.held
            .push((of, self.world.stores[of].hold(object, tag)));
    }

    pub fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let at = self.below(self.held.len());
        let (of, held) = self.held.swap_remove(at);
        let store = &self.world.stores[of];
        match self.below(16) {
            0 => {
                let object = store.give_up(&held);
                // SAFETY: the object came from this cache and is given up.
                unsafe { store.cache.free_deferred(object) };
            }
            _ => store.free(held),
        }
    }

    /// Allocates and frees in bulk.
    pub fn many(&mut self) {
        let (of, count) = (self.below(KINDS.len()), self.below(150));
        let store = &self.world.stores[of];
        let mut objects = vec![null_mut(); count];
        assert_eq!(store.cache.alloc_bulk(&mut objects), count);
        let tag = self.tag();
        let held: Vec<Held> = objects
            .iter()
            .map(|&object| store.hold(NonNull::new(object).unwrap(), tag))
            .collect();
        let objects: Vec<*mut u8> = held
            .iter()
            .map(|held| store.give_up(held).as_ptr())
            .collect();
        // SAFETY: the objects came from this cache and are given up.
        unsafe { store.cache.free_bulk(&objects) };
    }

    pub fn prefilled(&mut self) {
        let (of, count) = (self.below(KINDS.len()), self.below(150));
        let mut prefilled = self.world.stores[of].cache.prefill(count).unwrap();
        for _ in 0..self.below(count + 1).min(20) {
            self.keep(of, prefilled.alloc());
        }
        if self.below(4) == 0 {
            prefilled.refill(count).unwrap();
            assert_eq!(prefilled.len(), count);
        }
    }

    pub fn pooled(&mut self) {
        let Pool { pool, of } = &self.world.pools[self.below(POOLED.len())];
        let store = &self.world.stores[*of];
        let object = match self.below(4) {
            0 => pool.alloc_preallocated(),
            _ => pool.alloc(),
        };
        if let Some(object) = object {
            let held = store.hold(object, self.tag());
            let object = store.give_up(&held);
            // SAFETY: the object came from this pool and is given up.
            unsafe { pool.free(object) };
        }
        if self.below(200) == 0 {
            pool.resize(self.below(40)).unwrap();
        }
    }

    /// Hands an object to another thread, and takes one from another thread.
    pub fn hand_on(&mut self) {
        let mut exchange = self.world.exchange.lock().unwrap();
        exchange.extend(self.held.pop());
        if exchange.len() > EXCHANGED {
            let at = self.random.below(exchange.len() as u64) as usize;
            self.held.push(exchange.swap_remove(at));
        }
    }

    pub fn readers(&mut self) {
        let place = self.below(16);
        match self.below(4) {
            0 => self.world.replace(place),
            1 => self.world.read(place, 500),
            _ => self.world.read(place, 2),
        }
    }

    /// Reads the state of the caches, which changes nothing.
    pub fn look_on(&mut self) {
        let at = self.below(self.held.len().max(1));
        if let Some((of, held)) = self.held.get(at) {
            self.world.stores[*of].check(held);
        }
        let of = self.below(KINDS.len());
        let Store { cache, kind, .. } = &self.world.stores[of];
        match self.below(8) {
            0 => assert!(slabinfo().to_string().contains("stress-0")),
            1 => assert!(cache.attributes().to_string().contains("objs_per_slab")),
            2 => assert!(caches().map(|info| info.usage().slabs).sum::<usize>() > 0),
            3 => drop(cache.leaks_with(|_| {})),
            _ => cache
                .validate()
                .unwrap_or_else(|fault| panic!("{kind:?}: {fault}")),
        }
    }

    /// Does what affects all threads: shrinks, flushes, ticks, forks, or makes and destroys a
    /// cache.
    pub fn disturb(&mut self) {
        let of = self.below(KINDS.len());
        let cache = &self.world.stores[of].cache;
        let (what, disturb): (&'static &'static str, &dyn Fn(&mut Self)) = match self.below(12) {
            // Does nothing if the kernel cannot fence.
            0..3 => (&"shrink", &|_| _ = cache.shrink()),
            3 => (&"flush deferred", &|_| _ = cache.flush_deferred()),
            4 => (&"shrink all", &|_| _ = shrink_all()),
            5 => (&"flush items", &|this| {
                _ = this.world.items.flush_deferred();
            }),
            6 => (&"tick", &|_| _ = Shepherd::new().tick()),
            7 => (&"fork", &Self::fork),
            _ => (&"come and go", &Self::come_and_go),
        };
        doing(what);
        disturb(self);
    }

    /// Makes a cache, uses it and destroys it.
    pub fn come_and_go(&mut self) {
        let kind = KINDS[self.below(KINDS.len())];
        let store = Store::new("stress-short", kind);
        let mut held = Vec::new();
        for _ in 0..self.below(300) {
            let tag = self.tag();
            held.push(store.hold(store.cache.alloc().expect("memory"), tag));
            if self.below(3) == 0 {
                let held = held.swap_remove(self.below(held.len()));
                let object = store.give_up(&held);
                match self.below(4) {
                    // SAFETY: the object came from this cache and is given up.
                    0 => unsafe { store.cache.free_deferred(object) },
                    // SAFETY: the object came from this cache and is given up.
                    _ => unsafe { store.cache.free(object) },
                }
            }
            if self.below(100) == 0 {
                pin(self.below(64));
            }
        }
        doing(&"come and go, free all");
        held.into_iter().for_each(|held| store.free(held));
        doing(&"come and go, end");
        store.cache.validate().unwrap();
        self.world.end(store.cache);
        self.world.made.fetch_add(1, Relaxed);
    }

    /// Forks a child that uses all caches, frees what this thread holds, and exits.
    pub fn fork(&mut self) {
        FORKS.fetch_add(1, SeqCst);
        while AT_WORK.load(SeqCst) != 0 {
            std::thread::yield_now();
        }
        doing(&"fork, after the handlers");
        // SAFETY: the child uses only the caches, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        FORKS.fetch_sub(1, SeqCst);
        assert!(child >= 0, "no child");
        if child == 0 {
            // The alarm ends a child that hangs.
            // SAFETY: `alarm` has no preconditions.
            unsafe { libc::alarm(60) };
            let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..20 {
                    (0..100).for_each(|_| self.alloc());
                    self.many();
                    self.prefilled();
                    self.come_and_go();
                }
                self.world.replace(0);
                for store in self.world.stores {
                    store.cache.validate().unwrap();
                }
                while let Some((of, held)) = self.held.pop() {
                    self.world.stores[of].free(held);
                }
            }));
            // SAFETY: `_exit` has no preconditions.
            unsafe { libc::_exit(if fine.is_ok() { 0 } else { 7 }) };
        }
        doing(&"fork, waits for the child");
        let mut status = 0;
        // SAFETY: `status` is a live integer that the kernel may write to.
        let wait = |status: &mut i32| unsafe { libc::waitpid(child, status, 0) };
        while wait(&mut status) < 0 {}
        assert_eq!(status, 0, "a child failed");
        self.world.forks.fetch_add(1, Relaxed);
    }
}
