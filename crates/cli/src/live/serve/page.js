"use strict";
// What is known of each process, by its key.
const pasts = new Map();
// The flame graphs that are shown. They stay as they are until they are hidden.
const flames = new Map();
// How long a process that could not be read is remembered, in milliseconds.
const memory = 300000;
// The key of a process: another one that gets its number later has another key.
const keyOf = process => `${process.pid} ${process.started_ticks}`;
// The processes of which all caches are shown. Of the others, only busy caches are: at most these.
const unfolded = new Set();
const rows = 12;
let sorted = "bytes";
const mib = bytes => (bytes / 1048576).toFixed(1);
const cell = (row, text, kind = "td") => {
  const cell = document.createElement(kind);
  cell.append(text);
  row.append(cell);
};
const sums = [
  ["requested, about", "requested_bytes"], ["+ rounding", "rounding_bytes"], ["= live", "live_bytes"],
  ["+ in CPUs' sheaves", "in_sheaves_bytes"], ["live and CPUs' sheaves", "live_and_sheaves_bytes"],
  ["+ in barns", "in_barns_bytes"], ["+ free in slabs", "free_in_slabs_bytes"],
  ["+ dirty free runs", "dirty_bytes"], ["+ metadata", "metadata_bytes"],
  ["= resident, at most", "resident_bytes"], ["+ returned or untouched", "returned_or_untouched_bytes"],
  ["= reserved", "reserved_bytes"],
  ["held", "held_bytes"], ["held at the peak", "held_peak_bytes"], ["returned so far", "returned_bytes"],
];
// What the columns of caches are called, and their keys.
const columns = [
  ["name", "name"], ["objects", "objects"], ["active", "active_objects"], ["size", "slot_bytes"],
  ["slabs", "slabs"], ["bytes", "bytes"], ["refills/s", "rate"],
];

// The parts of the chart, from below. Their sum is what can be in memory at most.
const parts = [
  ["live and CPUs' sheaves", "live_and_sheaves_bytes"], ["barns", "in_barns_bytes"],
  ["free in slabs", "free_in_slabs_bytes"], ["dirty free runs", "dirty_bytes"], ["metadata", "metadata_bytes"],
];
const chartKeys = [...parts.map(([, key]) => key), "resident_bytes"];
const readings = 240;

function drawn(kind, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(text);
  return made;
}

// Rounds up to a number that is easy to read.
function round(value) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(value, .1)));
  return [1, 2, 5, 10].find(times => times * ten >= value) * ten;
}

// Draws what the parts were at the last readings, one above the other, with both axes.
function chart(sums, seconds) {
  const [left, right, top, bottom] = [60, 690, 8, 150];
  const most = round(Math.max(...sums.map(sum => sum.resident_bytes)) / 1048576);
  const y = bytes => bottom - (bottom - top) * bytes / 1048576 / most;
  const x = nth => right - (right - left) * (sums.length - 1 - nth) / (readings - 1);
  const picture = drawn("svg", {
    viewBox: "0 0 700 170", role: "img", "aria-label": "parts of the memory over time",
  });
  for (const share of [0, .5, 1]) {
    const at = y(share * most * 1048576);
    picture.append(drawn("path", { d: `M${left} ${at}H${right}`, class: "axis" }));
    const text = `${+(share * most).toFixed(2)} MiB`;
    picture.append(drawn("text", { x: left - 6, y: at + 4, class: "end" }, text));
  }
  const below = sums.map(() => 0);
  parts.forEach(([name, key], nth) => {
    const lower = sums.map((_, at) => `${x(at).toFixed(1)},${y(below[at]).toFixed(1)}`);
    sums.forEach((sum, at) => { below[at] += sum[key]; });
    const upper = sums.map((_, at) => `${x(at).toFixed(1)},${y(below[at]).toFixed(1)}`);
    const line = `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    const area = drawn("path", { d: line, class: `part${nth}` });
    area.append(drawn("title", {}, name));
    picture.append(area);
  });
  const age = Math.round(seconds);
  picture.append(drawn("text", { x: right, y: 166, class: "end" }, "now"));
  if (sums.length > 20) {
    picture.append(drawn("text", { x: Math.max(x(0), left), y: 166 }, `${age} s ago`));
  }
  return picture;
}

function legend() {
  const line = document.createElement("p");
  line.className = "legend";
  parts.forEach(([name], nth) => {
    const mark = document.createElement("span");
    mark.className = `mark part${nth}`;
    line.append(mark, `${name} `);
  });
  return line;
}

function link(address, text) {
  const made = document.createElement("a");
  made.href = address;
  made.append(text);
  return made;
}

function table(heads, lines) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of heads) cell(head, text, "th");
  const body = table.createTBody();
  for (const texts of lines) {
    const row = body.insertRow();
    for (const text of texts) cell(row, text);
  }
  return table;
}

function others(process, now, past, seconds) {
  const rate = (key, value) => {
    const before = past.others.get(key) ?? value;
    past.others.set(key, value);
    return Math.round(Math.max(0, value - before) / seconds).toLocaleString();
  };
  const nodes = process.nodes.map((node, nth) => [
    `node ${node.node}`, mib(node.used_bytes), mib(node.slabs_bytes), mib(node.dirty_bytes),
    mib(node.in_barns_bytes),
    ...["refills", "remote_frees", "node_mismatches"].map(key => rate(`${nth} ${key}`, node[key])),
  ]);
  const {threads, ticks, ticked_seconds, in_ticks_seconds, folds} = process.shepherd;
  const age = Math.max(0, Date.now() / 1000 - ticked_seconds);
  const ago = ticked_seconds === null ? "–" : `${age.toFixed(1)} s ago`;
  return [
    table(["CPU", "threads here last"], process.cpus.map(cpu => [cpu.name, cpu.threads])),
    table(["node", "used MiB", "slabs MiB", "dirty MiB", "barns MiB", "refills/s", "remote/s",
      "other node/s"], nodes),
    table(["shepherd", "ticks", "last", "ms in ticks", "folds"],
      [[threads ? `${threads} thread${threads === 1 ? "" : "s"}` : "slow paths", ticks, ago,
        (in_ticks_seconds * 1e3).toFixed(1), folds]]),
  ];
}

// Returns the flame graph of a process, which the server makes now.
function flame(process) {
  const address = `heap.svg?pid=${process.pid}`;
  const figure = document.createElement("figure"), picture = document.createElement("img");
  const said = document.createElement("figcaption");
  picture.alt = `flame graph of the heap of process ${process.pid}`;
  said.append("Making the flame graph …");
  picture.onload = () => {
    const saved = link(address, "save it");
    saved.download = `heap-${process.pid}.svg`;
    said.replaceChildren(saved, " to search and zoom in it; this makes it anew");
  };
  picture.onerror = async () => {
    picture.remove();
    try {
      const answer = await fetch(address);
      said.textContent = answer.ok ? "The server was busy; hide and show it again." :
        await answer.text();
    } catch (error) {
      said.textContent = error.message;
    }
  };
  picture.src = address;
  figure.append(picture, said);
  return figure;
}

function show(process, now) {
  const key = keyOf(process);
  const past = pasts.get(key) ??
    { sums: [], refills: new Map(), others: new Map(), when: now };
  past.sums.push({ ...Object.fromEntries(chartKeys.map(key => [key, process[key]])), when: now });
  if (past.sums.length > readings) past.sums.shift();
  const seconds = Math.max(.001, (now - past.when) / 1000);
  for (const cache of process.caches) {
    const before = past.refills.get(cache.name) ?? cache.refills;
    cache.rate = Math.round(Math.max(0, cache.refills - before) / seconds);
    cache.bytes = cache.slabs * cache.slab_bytes;
    past.refills.set(cache.name, cache.refills);
  }
  past.when = now;
  pasts.set(key, past);
  const section = document.createElement("section");
  const title = document.createElement("h2");
  title.append(`${process.name} (process ${process.pid}) on ${process.backend}`);
  section.append(title);
  section.append(chart(past.sums, (now - past.sums[0].when) / 1000), legend());
  const profile = document.createElement("p");
  profile.append(
    link(`debug/pprof/heap?pid=${process.pid}`, "heap profile"),
    ` for pprof, after pinfold heap start ${process.pid} `);
  const button = document.createElement("button");
  button.append(flames.has(key) ? "hide the flame graph" : "show the flame graph");
  button.onclick = () => {
    if (!flames.delete(key)) flames.set(key, flame(process));
    update();
  };
  profile.append(button);
  section.append(profile);
  if (flames.has(key)) section.append(flames.get(key));
  const sum = document.createElement("table");
  const counts = "live_bytes" in process;
  for (const [what, key] of sums) {
    if (!(key in process) || (counts && key === "live_and_sheaves_bytes")) continue;
    const row = sum.insertRow();
    if (what.startsWith("=")) row.className = "total";
    cell(row, what);
    cell(row, `${mib(process[key])} MiB`);
  }
  section.append(sum);
  const caches = document.createElement("table");
  const head = caches.createTHead().insertRow();
  for (const [column, key] of columns) {
    const button = document.createElement("button");
    button.append((key === sorted ? "▾ " : "") + column);
    button.onclick = () => { sorted = key; update(); };
    cell(head, button, "th");
  }
  section.append(...others(process, now, past, seconds));
  const order = (a, b) => sorted === "name" ? a.name.localeCompare(b.name) : b[sorted] - a[sorted];
  const body = caches.createTBody();
  const isBusy = cache => cache.active_objects > 0 || cache.rate > 0;
  const busy = process.caches.filter(isBusy).sort(order);
  const all = process.caches.sort(order);
  const shown = unfolded.has(key) ? all : busy.slice(0, rows);
  for (const cache of shown) {
    const row = body.insertRow();
    for (const [, key] of columns) cell(row, cache[key].toLocaleString());
  }
  section.append(caches);
  if (all.length > shown.length || unfolded.has(key)) {
    const fold = document.createElement("button");
    fold.append(unfolded.has(key) ? "show fewer caches" : `show all ${all.length} caches`);
    fold.onclick = () => {
      if (!unfolded.delete(key)) unfolded.add(key);
      update();
    };
    section.append(fold);
  }
  return section;
}

async function update() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("status.json");
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const status = await answer.json();
    const now = performance.now(), count = status.processes.length;
    const sections = status.processes.map(process => show(process, now));
    const missing = Object.values(status.unread).reduce((sum, count) => sum + count, 0);
    const read = new Set(status.processes.map(keyOf));
    for (const [key, past] of pasts) {
      if (read.has(key) || (missing && now - past.when < memory)) continue;
      for (const known of [pasts, flames, unfolded]) known.delete(key);
    }
    document.getElementById("processes").replaceChildren(...sections);
    const unread = missing === 0 ? "" : `; ${missing} more could not be read`;
    state.textContent = `${count} process${count === 1 ? "" : "es"}, read at ${new Date().toLocaleTimeString()}${unread}`;
  } catch (error) {
    state.textContent = `Cannot read: ${error.message} (is pinfold serve still running?)`;
  }
}
update();
setInterval(update, 1000);
