"use strict";
const record = JSON.parse(document.getElementById("record").textContent);
const layers = record.kept.length, heads = record.kept[0].length, tokens = record.tokens;
const byId = id => document.getElementById(id);
const number = n => n.toLocaleString("en-US");
const percent = x => (100 * x).toFixed(1) + "%";
const plural = (n, word) => number(n) + " " + word + (n === 1 ? "" : "s");
const MIB = 1 << 20;

// Text from the record only ever becomes text: nothing in a prompt is parsed as markup.
function element(parent, name, attributes = {}, text = null) {
  const svg = parent instanceof SVGElement || name === "svg";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function describe(list, entries) {
  for (const [term, value] of entries) {
    const box = list.className === "tiles" ? element(list, "div") : list;
    element(box, "dt", {}, term);
    element(box, "dd", {}, value);
  }
}

function table(parent, columns, rows) {
  const details = element(parent, "details");
  element(details, "summary", {}, "As a table");
  const body = element(details, "table");
  const head = element(body, "tr");
  for (const column of columns) element(head, "th", { scope: "col" }, column);
  for (const row of rows) {
    const line = element(body, "tr");
    for (const value of row) element(line, "td", {}, typeof value === "number" ? number(value) : value);
  }
}

// ------------------------------------------------------------------------------------------------ header

const blocks = record.steps.map(step => step.blocks);
const peak = Math.max(0, ...blocks), held = blocks.at(-1) ?? 0;

function drawHeader() {
  const tiles = [
    ["Prompt tokens", number(tokens)],
    ["Kept of the prompt", percent(record.share)],
    ["Blocks, peak \u2192 end", number(peak) + " \u2192 " + number(held)],
    ["Answer tokens", number(record.answer.length)],
  ];
  if (record.clusters.length) tiles.push(["Drift triggers", number(record.triggers)]);
  describe(byId("tiles"), tiles);
  const versions = Object.entries(record.versions).map(pair => pair.join(" ")).join(", ");
  const knobs = Object.keys(record.knobs).length ? JSON.stringify(record.knobs) : "defaults";
  describe(byId("facts"), [
    ["Model", record.model + ", " + plural(layers, "layer") + " of " + plural(heads, "KV head")],
    ["Policy", record.policy],
    ["Knobs", knobs],
    ["Resolved", record.summary],
    ["Versions", versions],
  ]);
}

// ------------------------------------------------------------------------------------------------ heads

const cells = [];  // [layer][head]
const role = (layer, head) => record.roles ? record.roles[layer][head] : "";
const nameOf = (layer, head) => `Layer ${layer}, head ${head}` + (record.roles ? ` (${role(layer, head)})` : "");

function drawHeads() {
  const grid = byId("heads");
  const columns = `grid-template-columns: 3.6rem repeat(${layers}, minmax(9px, 1fr))`;
  grid.classList.toggle("dense", layers > 48);
  for (let layer = 0; layer < layers; layer++) cells.push([]);
  for (let head = 0; head < heads; head++) {
    const row = element(grid, "div", { role: "row", style: columns });
    element(row, "span", { role: "rowheader" }, "head " + head);
    for (let layer = 0; layer < layers; layer++) {
      const count = record.counts[layer][head], share = count / tokens;
      const label = `${nameOf(layer, head)}: keeps ${number(count)} of ${plural(tokens, "token")}, ${percent(share)}`;
      const cell = element(row, "button", {
        type: "button", role: "gridcell", class: share > 0.55 ? "cell strong" : "cell", style: `--share: ${share}`,
        tabindex: layer || head ? -1 : 0, title: label, "aria-label": label, "aria-selected": "false",
      }, role(layer, head).slice(0, 1).toUpperCase());
      cell.addEventListener("click", () => select(layer, head));
      cell.addEventListener("keydown", event => move(event, layer, head));
      cells[layer].push(cell);
    }
  }
  const axis = element(grid, "div", { role: "row", style: columns });
  element(axis, "span", { role: "rowheader" }, "layer");
  for (let layer = 0; layer < layers; layer++) {
    element(axis, "span", { role: "columnheader", class: "axis", "aria-label": "layer " + layer }, layer % 5 ? "" : layer);
  }
  const legend = byId("legend");
  const ramp = element(legend, "span", {}, "0%");
  element(ramp, "span", { class: "ramp", "aria-hidden": "true" });
  ramp.append("100% of the prompt");
  if (record.roles) {
    const counts = {};
    for (const name of record.roles.flat()) counts[name] = (counts[name] || 0) + 1;
    for (const name of Object.keys(counts).sort()) {
      element(legend, "span", {}, `${name[0].toUpperCase()}: ${name} (${counts[name]})`);
    }
  }
}

function move(event, layer, head) {
  const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const next = cells[layer + step[0]]?.[head + step[1]];
  if (next) focusCell(next);
}

function focusCell(cell) {
  for (const other of cells.flat()) other.tabIndex = other === cell ? 0 : -1;
  cell.focus();
}

// ------------------------------------------------------------------------------------------------ prompt

const words = [];  // a span per token

function drawPrompt() {
  record.prompt.forEach((text, i) => {
    const title = `Token ${number(i)}: kept by ${number(record.votes[i])} of ${plural(layers * heads, "head")}`;
    words.push(element(byId("prompt"), "span", { title }, text));
  });
  byId("answer").textContent = record.answer.join("") || "(empty)";
}

function sharesOf(selected) {
  if (!selected) return record.votes.map(votes => votes / (layers * heads));
  const shares = new Array(tokens).fill(0);
  for (const [start, end] of record.kept[selected[0]][selected[1]]) shares.fill(1, start, end);
  return shares;
}

function show(selected) {
  const shares = sharesOf(selected);
  words.forEach((word, i) => {
    word.style.setProperty("--share", shares[i]);
    word.classList.toggle("gone", shares[i] === 0);
  });
  cells.forEach((row, layer) => row.forEach((cell, head) => {
    cell.setAttribute("aria-selected", String(Boolean(selected) && selected[0] === layer && selected[1] === head));
  }));
  byId("all").disabled = !selected;
  byId("selection").textContent = selected
    ? cells[selected[0]][selected[1]].getAttribute("aria-label") + ". What it dropped is pale."
    : `All heads together keep ${percent(record.share)}. The more heads keep a token, the darker it is.`;
  drawPlaces(shares);
}

function select(layer, head) {
  const again = cells[layer][head].getAttribute("aria-selected") === "true";
  history.replaceState(null, "", again ? "#" : `#layer=${layer}&head=${head}`);
  show(again ? null : [layer, head]);
}

function selectNone() {
  history.replaceState(null, "", "#");
  show(null);
}

// A link to the page may name a head: #layer=3&head=1
function showLinked() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const layer = Number(wanted.get("layer") ?? NaN), head = Number(wanted.get("head") ?? NaN);
  show(cells[layer]?.[head] ? [layer, head] : null);
}

// ------------------------------------------------------------------------------------------------ charts

const WIDE = 1000, LEFT = 62;  // of every chart, in its own units

function chart(parent, height, label) {
  parent.replaceChildren();
  return element(parent, "svg", { viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label": label });
}

function drawPlaces(shares) {
  const bins = Math.min(tokens, 200), width = (WIDE - LEFT) / bins, high = 46;
  const svg = chart(byId("places"), high + 18, "Share of each part of the prompt that is kept, from its beginning to its end");
  for (let bin = 0; bin < bins; bin++) {
    const from = Math.floor(bin * tokens / bins), to = Math.floor((bin + 1) * tokens / bins);
    const share = shares.slice(from, to).reduce((a, b) => a + b, 0) / (to - from);
    const y = high * (1 - share);
    const bar = element(svg, "rect", { class: "place", x: LEFT + bin * width, y, width: width * 0.9, height: high - y });
    element(bar, "title", {}, `tokens ${number(from)} to ${number(to - 1)}: ${percent(share)}`);
  }
  element(svg, "line", { class: "rule", x1: LEFT, x2: WIDE, y1: high + .5, y2: high + .5 });
  element(svg, "text", { x: LEFT - 6, y: 9, "text-anchor": "end" }, "100%");
  element(svg, "text", { x: LEFT - 6, y: high, "text-anchor": "end" }, "kept 0%");
  element(svg, "text", { x: LEFT, y: high + 14 }, "token 0");
  element(svg, "text", { x: WIDE, y: high + 14, "text-anchor": "end" }, "token " + number(tokens - 1));
}

// The next of 1, 2, 5, 10, 20, 50, ... to `least`.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map(times => times * power).find(step => step >= least);
}

function axis(svg, y, most, word, at) {
  element(svg, "line", { class: "rule", x1: LEFT, x2: WIDE, y1: y, y2: y });
  const step = roundStep(most / 8);
  for (let value = 0; value <= most; value += step) {
    element(svg, "text", { x: at(value), y: y + 15, "text-anchor": "middle" }, number(value));
  }
  element(svg, "text", { x: LEFT - 6, y: y + 15, "text-anchor": "end" }, word);
}

function drawDrift() {
  if (!record.clusters.length) return;
  byId("drift").hidden = false;
  const last = Math.max(record.answer.length - 1, 1);  // the last token's own K and V are never stored
  const places = [...new Set(record.drifts.flatMap(drift => drift.clusters))].sort((a, b) => a - b);
  byId("drift-note").textContent = `${plural(record.checks, "check")} of ${plural(record.clusters.length, "pivot")}, `
    + `${plural(record.triggers, "trigger")}. An open mark is a check at which a pivot's attention had drifted; a full one `
    + "is the first token for which its satellites saw what they fetched.";
  if (!places.length) return;
  const high = 20 * places.length, at = value => LEFT + 8 + value / last * (WIDE - LEFT - 20);
  const label = `${plural(record.triggers, "trigger")} over ${plural(record.answer.length, "answer token")}`;
  const svg = chart(byId("drift-chart"), high + 20, label), rows = [];
  places.forEach((place, i) => {
    const cluster = record.clusters[place], y = 20 * i + 10;
    const name = `L${cluster.layer} H${cluster.pivot}`;
    element(svg, "text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, name);
    element(svg, "line", { class: "rule", x1: LEFT, x2: WIDE, y1: y, y2: y });
    for (const drift of record.drifts.filter(drift => drift.clusters.includes(place))) {
      const landed = drift.lands <= record.answer.length - 1;
      const told = `${name}: drift found after ${plural(drift.checked, "answer token")}; ${number(cluster.tokens)} tokens `
        + `for ${plural(cluster.satellites.length, "satellite")} ` + (landed ? `seen from token ${drift.lands} on` : "never seen");
      const group = element(svg, "g");
      element(group, "title", {}, told);
      if (landed) {
        element(group, "line", { class: "flight", x1: at(drift.checked), x2: at(drift.lands), y1: y, y2: y });
        element(group, "circle", { class: "land", cx: at(drift.lands), cy: y, r: 4 });
      }
      element(group, "circle", { class: "check", cx: at(drift.checked), cy: y, r: 4 });
      rows.push([name, drift.checked, landed ? drift.lands : "never", cluster.satellites.join(" "), cluster.tokens]);
    }
  });
  axis(svg, high + 2, last, "token", at);
  table(byId("drift-chart"), ["pivot", "found after", "seen from", "satellites", "tokens fetched"], rows);
}

function drawPool() {
  const size = record.pool.block_tokens, steps = record.steps;
  const dense = steps.map(step => Math.ceil(step.tokens / size));
  const most = Math.max(1, ...blocks, ...dense), high = 170;
  const mib = count => number(Number((count * record.pool.block_bytes / MIB).toFixed(1))) + " MiB";
  byId("pool-note").textContent = `After each step of the engine, of ${number(record.pool.blocks - 1)} blocks in the pool; `
    + `a block is ${size} tokens of all heads, ${mib(1)}. Dashed: what the request would hold if nothing were dropped. `
    + "A block that was given back is free from the next step on.";
  if (!steps.length) return;
  const last = Math.max(steps.length - 1, 1);
  const at = i => LEFT + 8 + i / last * (WIDE - LEFT - 20), up = count => 8 + (high - 8) * (1 - count / most);
  const label = `At most ${plural(peak, "block")}, ${number(held)} at the end; ${number(dense[dense.length - 1])} without a policy`;
  const svg = chart(byId("pool-chart"), high + 20, label);
  for (const count of [0, Math.round(most / 2), most]) {
    element(svg, "line", { class: "rule", x1: LEFT, x2: WIDE, y1: up(count), y2: up(count) });
    element(svg, "text", { x: LEFT - 6, y: up(count) + 4, "text-anchor": "end" }, number(count));
  }
  const path = counts => counts.map((count, i) => `${i ? "H" + at(i) + "V" : "M" + at(0) + " "}${up(count)}`).join("");
  element(svg, "path", { class: "area", d: `${path(blocks)}V${up(0)}H${at(0)}Z` });
  element(svg, "path", { class: "dense-line", d: path(dense) });
  element(svg, "path", { class: "ours", d: path(blocks) });
  steps.forEach((step, i) => {
    const width = (WIDE - LEFT) / steps.length;
    const hover = element(svg, "rect", { x: at(i) - width / 2, y: 0, width, height: high, fill: "transparent" });
    element(hover, "title", {}, `Step ${i}: ${plural(step.tokens, "token")}, ${plural(step.blocks, "block")} (${mib(step.blocks)})`);
  });
  axis(svg, high, last, "step", at);
  table(byId("pool-chart"), ["step", "tokens", "blocks", "blocks without a policy"],
    steps.map((step, i) => [i, step.tokens, step.blocks, dense[i]]));
}

drawHeader();
drawHeads();
drawPrompt();
drawDrift();
drawPool();
showLinked();
byId("all").addEventListener("click", selectNone);
addEventListener("hashchange", showLinked);
addEventListener("keydown", event => { if (event.key === "Escape") selectNone(); });
