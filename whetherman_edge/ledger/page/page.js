"use strict";
// Every string that came from a model or an agent becomes a text node: nothing here writes HTML.
// The same file serves the live page and the replay file; the latter brings its rows along in a JSON element.

const $ = (id) => document.getElementById(id);
const LABELS = ["ACT", "ANSWER", "ASK", "DECLINE"];
const REFRESH_MS = 3000;
const SVG = "http://www.w3.org/2000/svg";

const state = { rows: [], open: new Set(), before: 0, recorded: null };

function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = String(text);
  if (className) node.className = className;
  return node;
}

function number(value, digits = 0) {
  return Number(value || 0).toLocaleString(undefined, { maximumFractionDigits: digits });
}

function time(seconds) {
  const at = new Date(seconds * 1000);
  if (at.toDateString() === new Date().toDateString()) return at.toLocaleTimeString();
  return at.toLocaleString(undefined, { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });
}

// Makes the children of parent like the wanted ones, and leaves alone what is as wanted: focus, selection and an open list
// of choices live in the nodes. A node's key says which one it is to be compared with; without one, its place does.
function settle(parent, wanted) {
  const keyOf = (node, place) => node.dataset.key || "#" + place;
  const present = new Map([...parent.children].map((node, place) => [keyOf(node, place), node]));
  const nodes = wanted.map((node, place) => {
    const before = present.get(keyOf(node, place));
    if (!before || before.tagName !== node.tagName) return node;
    present.delete(keyOf(node, place));
    if (!before.isEqualNode(node)) alike(before, node);
    return before;
  });
  const staying = new Set(nodes);
  const leaving = [...parent.children].filter((node) => !staying.has(node));
  inherit(parent, leaving, staying);
  for (const node of leaving) node.remove();
  const used = nodes.find(isUsed);
  let at = parent.firstElementChild;
  for (const node of nodes) {
    // To move a node takes its focus and selection: whatever stands before it moves instead.
    while (node === used && at !== used && used.parentNode === parent) {
      const next = at.nextElementSibling;
      parent.append(at);
      at = next;
    }
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
}

// Whether somebody has the focus or selected text in it.
function isUsed(node) {
  const selection = getSelection();
  return node.contains(document.activeElement) || (!selection.isCollapsed && selection.containsNode(node, true));
}

// A row that leaves the list while it has the focus gives it to the next one that stays, or else to the last.
function inherit(parent, leaving, staying) {
  const lost = leaving.find((node) => node.contains(document.activeElement));
  if (!lost) return;
  const heirs = [...parent.children].filter((node) => staying.has(node) && node.tabIndex >= 0);
  const next = heirs.find((node) => lost.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING);
  const heir = next || heirs[heirs.length - 1];
  if (heir) heir.focus({ preventScroll: true });
}

// Every node of this page holds either text or elements.
function alike(node, wanted) {
  for (const { name } of [...node.attributes]) if (!wanted.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  if (node.children.length || wanted.children.length) settle(node, [...wanted.children]);
  else if (node.textContent !== wanted.textContent) node.textContent = wanted.textContent;
}

function cards(parent, pairs) {
  settle(parent, pairs.map(([value, label]) => {
    const card = make("div", undefined, "card");
    card.append(make("b", value), make("span", label));
    return card;
  }));
}

function table(node, columns, values, keyOf) {
  const head = make("tr");
  for (const [title, , numeric] of columns) head.append(make("th", title, numeric ? "n" : ""));
  const body = values.map((value) => {
    const line = make("tr");
    line.dataset.key = "=" + keyOf(value);
    for (const [, read, numeric] of columns) line.append(make("td", read(value), numeric ? "n" : "wrap"));
    return line;
  });
  if (!body.length) {
    const empty = make("td", "nothing yet");
    empty.colSpan = columns.length;
    const line = make("tr");
    line.append(empty);
    body.push(line);
  }
  settle(node, [head, ...body]);
}

function days(parent, perDay) {
  const most = Math.max(1, ...perDay.map((day) => LABELS.reduce((sum, label) => sum + day[label], 0)));
  settle(parent, perDay.length ? perDay.map((day) => {
    const line = make("div", undefined, "day");
    const bar = document.createElementNS(SVG, "svg");
    bar.setAttribute("viewBox", "0 0 100 10");
    bar.setAttribute("preserveAspectRatio", "none");
    let x = 0;
    let total = 0;
    for (const label of LABELS) {
      const part = document.createElementNS(SVG, "rect");
      const width = (100 * day[label]) / most;
      part.setAttribute("x", x);
      part.setAttribute("width", width);
      part.setAttribute("height", 10);
      part.setAttribute("class", label.toLowerCase());
      const title = document.createElementNS(SVG, "title");
      title.textContent = label + " " + day[label];
      part.append(title);
      bar.append(part);
      x += width;
      total += day[label];
    }
    line.append(make("span", day.day), bar, make("span", number(total)));
    return line;
  }) : [make("p", "nothing yet")]);
}

function choices(id, values) {
  const select = $(id);
  const chosen = select.value;
  const known = new Set(values.filter(Boolean));
  if (chosen) known.add(chosen);
  const options = ["", ...[...known].sort()].map((value) => {
    const option = make("option", value || "all");
    option.value = value;
    option.dataset.key = "=" + value;
    return option;
  });
  settle(select, options);
  if (select.value !== chosen) select.value = chosen;
}

function happened(row) {
  if (row.fault) return row.fault;
  if (row.status !== 200) return "HTTP " + row.status;
  if (row.calls < 0) return "not counted";
  return row.calls === 0 ? "answered" : row.calls === 1 ? "1 call" : row.calls + " calls";
}

const ROW_COLUMNS = ["time", "decision", "confidence", "changed", "reason", "agent", "step", "what happened", "seconds"];

function rowNodes(row) {
  const line = make("tr", undefined, row.suspect ? "row suspect" : "row");
  const decision = make("td");
  decision.append(make("span", row.decision, "tag " + row.decision.toLowerCase()));
  const why = make("td", row.suspect ? happened(row) + " – " + row.suspect : happened(row), "wrap why");
  line.append(
    make("td", time(row.at_s)), decision, make("td", number(row.confidence, 3), "n"),
    make("td", row.applied ? "yes (" + row.plan + ")" : row.mode === "shadow" ? "no (shadow)" : "no"),
    make("td", row.reason), make("td", row.agent, "wrap"),
    make("td", (row.last_role || "?") + " / " + row.messages), why, make("td", number(row.total_ms / 1000, 2), "n"),
  );
  const more = make("tr", undefined, "more");
  more.hidden = !state.open.has(row.id);
  const cell = make("td");
  cell.append(make("div", Object.entries(row).filter(([, value]) => value !== "").map(([name, value]) => name + "=" + value).join("  ")));
  cell.colSpan = ROW_COLUMNS.length;
  more.append(cell);
  line.dataset.key = "row" + row.id;
  more.dataset.key = "more" + row.id;
  line.tabIndex = 0;
  const toggle = () => {
    more.hidden = !more.hidden;
    if (more.hidden) state.open.delete(row.id); else state.open.add(row.id);
  };
  line.addEventListener("click", toggle);
  line.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  return [line, more];
}

function passes(row) {
  const agent = $("f-agent").value;
  const reason = $("f-reason").value;
  const decision = $("f-decision").value;
  const applied = $("f-applied").value;
  return (!decision || row.decision === decision) && (!applied || row.applied === (applied === "yes"))
    && (!agent || row.agent === agent) && (!reason || row.reason === reason)
    && (!$("f-suspect").checked || row.suspect);
}

// The row that must not move on the screen when others come before it: the one in use, or whoever reads on has the first
// in view. With the beginning of the list in view there is none.
function inView() {
  const lines = [...$("rows").children];
  const isSeen = (line) => line.getBoundingClientRect().bottom > 0 && line.getBoundingClientRect().top < innerHeight;
  const used = lines.find(isUsed);
  if (used && isSeen(used)) return used;
  return lines.length && !isSeen(lines[0]) ? lines.find(isSeen) : undefined;
}

function steadily(change) {
  const held = inView();
  const top = held && held.getBoundingClientRect().top;
  change();
  if (held && held.isConnected) scrollBy(0, held.getBoundingClientRect().top - top);
}

function showRows() {
  const head = make("tr");
  for (const title of ROW_COLUMNS) head.append(make("th", title, title === "confidence" || title === "seconds" ? "n" : ""));
  const shown = state.rows.filter(passes);
  const nodes = shown.flatMap(rowNodes);
  if (!nodes.length) {
    const empty = make("td", "no decision here");
    empty.colSpan = ROW_COLUMNS.length;
    const line = make("tr");
    line.append(empty);
    nodes.push(line);
  }
  settle($("rows"), [head, ...nodes]);
}

function showSummary(data) {
  const hour = data.hour;
  cards($("now"), [...LABELS.map((label) => [number(hour[label]), label]), [number(hour.applied), "requests changed"]]);
  const saved = data.savings;
  cards($("saved"), saved.enough
    ? [[number(saved.calls, 1), "tool calls skipped"], [number(saved.tokens), "tokens"], [number(saved.seconds), "seconds"]]
    : [["–", "tool calls skipped"], ["–", "tokens"], ["–", "seconds"]]);
  $("saved-note").textContent = saved.enough ? "" : "Not known yet: too few shadow requests to compare with.";
  $("method").textContent = saved.method;
  table($("basis"), [
    ["decision", (one) => one.decision], ["withheld", (one) => number(one.withheld), true],
    ["shadow", (one) => number(one.shadow), true],
    ["called in shadow", (one) => (one.shadow_called === null ? "–" : number(100 * one.shadow_called, 1) + " %"), true],
  ], saved.basis, (one) => one.decision);
  days($("days"), data.per_day);
  table($("agents"), [
    ["agent", (one) => one.agent || "–"], ["profile", (one) => one.profile || "none (shadow)"],
    ["requests", (one) => number(one.requests), true], ["changed", (one) => number(one.applied), true],
    ["would change", (one) => number(one.shadowed), true], ["called", (one) => number(one.called), true],
    ["scored: leaked", (one) => number(one.leaked - one.loop_guard_leaked), true],
    ["scored: backed off", (one) => number(one.backed_off - one.loop_guard_backed_off), true],
    ["loop guard: leaked", (one) => number(one.loop_guard_leaked), true],
    ["loop guard: backed off", (one) => number(one.loop_guard_backed_off), true],
    ["gate ms", (one) => number(one.gate_ms, 2), true], ["last", (one) => time(one.last_s)],
  ], data.agents, (one) => one.agent + " " + one.profile);
  table($("reasons"), [["reason", (one) => one.reason], ["requests", (one) => number(one.n), true]], data.reasons, (one) => one.reason);
  choices("f-agent", data.agents.map((one) => one.agent));
  choices("f-reason", data.reasons.map((one) => one.reason));
}

function say(text, bad) {
  if ($("state").textContent !== text) $("state").textContent = text; // else a reader would hear it again each time
  $("state").className = bad ? "bad" : "";
}

function address(older) {
  const query = new URLSearchParams();
  for (const name of ["decision", "applied", "agent", "reason"]) if ($("f-" + name).value) query.set(name, $("f-" + name).value);
  if (older && state.before) query.set("before", state.before);
  return "data.json?" + query;
}

async function load(older) {
  const headers = {};
  const key = sessionStorage.getItem("key");
  if (key) headers["x-api-key"] = key;
  let answer;
  try {
    answer = await fetch(address(older), { headers, cache: "no-store" });
  } catch {
    say("the sidecar does not answer", true);
    return;
  }
  $("key").hidden = answer.status !== 401;
  if (!answer.ok) {
    say(answer.status === 401 ? "this sidecar asks for its API key" : "the ledger cannot be read (" + answer.status + ")", true);
    return;
  }
  const data = await answer.json();
  const known = new Map((older ? state.rows : []).concat(data.rows_list).map((row) => [row.id, row]));
  state.rows = [...known.values()].sort((a, b) => b.id - a.id);
  if (state.rows.length) state.before = state.rows[state.rows.length - 1].id;
  steadily(() => { showSummary(data); showRows(); });
  const dropped = Object.values(data.dropped || {}).reduce((sum, n) => sum + n, 0);
  say(number(data.rows) + " decisions recorded" + (data.recording ? "" : " (recording is off)")
    + (dropped ? "; " + number(dropped) + " could not be recorded" : ""), dropped > 0);
  if (older) $("f-live").checked = false;
}

function start() {
  const embedded = $("recorded");
  for (const id of ["f-decision", "f-applied", "f-agent", "f-reason", "f-suspect"]) {
    $(id).addEventListener("change", () => { showRows(); if (!embedded) load(false); });
  }
  if (embedded) {
    const data = JSON.parse(embedded.textContent);
    $("f-live").parentNode.hidden = true;
    $("more").hidden = true;
    showSummary(data);
    state.rows = data.rows_list;
    showRows();
    const suspects = data.rows_list.filter((row) => row.suspect).length;
    say(number(data.rows_list.length) + " recorded decisions, " + number(suspects) + " likely wrong");
    return;
  }
  $("key").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", $("key-value").value);
    load(false);
  });
  $("more").addEventListener("click", () => load(true));
  setInterval(() => { if ($("f-live").checked && !document.hidden) load(false); }, REFRESH_MS);
  load(false);
}

start();
