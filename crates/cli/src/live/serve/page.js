"use strict";
const pasts = new Map();
let sorted = "bytes";
const mib = bytes => (bytes / 1048576).toFixed(1);
const cell = (row, text, kind = "td") => {
  const cell = document.createElement(kind);
  cell.append(text);
  row.append(cell);
};
const sums = [
  ["requested, about", "requested"], ["+ rounding", "rounding"], ["= live", "live"],
  ["+ in CPUs' sheaves", "in_sheaves"], ["live and CPUs' sheaves", "live_and_sheaves"],
  ["+ in barns", "in_barns"], ["+ free in slabs", "free_in_slabs"],
  ["+ dirty free runs", "dirty"], ["+ metadata", "metadata"],
  ["= resident, at most", "resident"], ["+ returned or untouched", "returned"],
  ["= reserved", "reserved"],
  ["held", "held"], ["held at the peak", "peak"], ["returned so far", "returned_so_far"],
];
const columns = ["name", "objects", "active", "size", "slabs", "bytes", "refills"];

function line(values) {
  const most = Math.max(1, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((v, x) => `${(x * step).toFixed(2)},${(38 - 36 * v / most).toFixed(2)}`);
  const make = (kind, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const picture = make("svg", {
    viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img",
    "aria-label": "memory held over time",
  });
  picture.append(make("path", { d: `M${points.join("L")}` }));
  return picture;
}

function table(heads, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of heads) cell(head, text, "th");
  const body = table.createTBody();
  for (const texts of rows) {
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
    `node ${nth}`, mib(node.used), mib(node.slabs), mib(node.dirty), mib(node.in_barns),
    ...node.counts.map((count, which) => rate(`${nth} ${which}`, count)),
  ]);
  const {threads, ticks, ticked_ns, in_ticks_ns, folds} = process.shepherd;
  const ago = ticks === 0 ? "–" : `${Math.max(0, Date.now() / 1000 - ticked_ns / 1e9).toFixed(1)} s ago`;
  return [
    table(["CPU", "threads here last"], process.cpus),
    table(["node", "used MiB", "slabs MiB", "dirty MiB", "barns MiB", "refills/s", "remote/s",
      "other node/s"], nodes),
    table(["shepherd", "ticks", "last", "ms in ticks", "folds"],
      [[threads ? `${threads} thread${threads === 1 ? "" : "s"}` : "slow paths", ticks, ago,
        (in_ticks_ns / 1e6).toFixed(1), folds]]),
  ];
}

function show(process, now) {
  const past = pasts.get(process.pid) ?? { held: [], refilled: new Map(), others: new Map(), when: now };
  past.held.push(process.sum.held);
  if (past.held.length > 240) past.held.shift();
  const seconds = Math.max(.001, (now - past.when) / 1000);
  for (const cache of process.caches) {
    const before = past.refilled.get(cache.name) ?? cache.refilled;
    cache.refills = Math.round(Math.max(0, cache.refilled - before) / seconds);
    past.refilled.set(cache.name, cache.refilled);
  }
  past.when = now;
  pasts.set(process.pid, past);
  const section = document.createElement("section");
  const title = document.createElement("h2");
  title.append(`${process.name} (process ${process.pid}) on ${process.backend}`);
  section.append(title);
  section.append(line(past.held));
  const sum = document.createElement("table");
  const counts = "live" in process.sum;
  for (const [what, key] of sums) {
    if (!(key in process.sum) || (counts && key === "live_and_sheaves")) continue;
    const row = sum.insertRow();
    if (what.startsWith("=")) row.className = "total";
    cell(row, what);
    cell(row, `${mib(process.sum[key])} MiB`);
  }
  section.append(sum);
  const caches = document.createElement("table");
  const head = caches.createTHead().insertRow();
  for (const column of columns) {
    const button = document.createElement("button");
    button.append((column === sorted ? "▾ " : "") + (column === "refills" ? "refills/s" : column));
    button.onclick = () => { sorted = column; update(); };
    cell(head, button, "th");
  }
  section.append(...others(process, now, past, seconds));
  const order = (a, b) => sorted === "name" ? a.name.localeCompare(b.name) : b[sorted] - a[sorted];
  const body = caches.createTBody();
  for (const cache of process.caches.sort(order)) {
    const row = body.insertRow();
    for (const column of columns) cell(row, cache[column].toLocaleString());
  }
  section.append(caches);
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
    for (const pid of status.unread ? [] : pasts.keys()) {
      if (!status.processes.some(process => process.pid === pid)) pasts.delete(pid);
    }
    document.getElementById("processes").replaceChildren(...sections);
    const unread = status.unread === 0 ? "" : `; ${status.unread} more could not be read`;
    state.textContent = `${count} process${count === 1 ? "" : "es"}, read at ${new Date().toLocaleTimeString()}${unread}`;
  } catch (error) {
    state.textContent = `Cannot read: ${error.message} (is pinfold serve still running?)`;
  }
}
update();
setInterval(update, 1000);
