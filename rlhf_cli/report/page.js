"use strict";
// Charts and the samples browser of the report. Everything that it reads is in the element #data.
const report = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------- charts

// Colours are variables of the style sheet, so that dark mode and print need no second drawing.
const text = {labelColor: "var(--soft)", titleColor: "var(--soft)", labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400};
const theme = {
  background: null,
  view: {stroke: null},
  axis: {...text, gridColor: "var(--line)", domainColor: "var(--line)", tickColor: "var(--line)"},
  legend: {labelColor: "var(--ink)", titleColor: "var(--soft)", symbolStrokeWidth: 2, symbolOpacity: 1},
  text: {color: "var(--ink)"},
  mark: {color: "var(--series-1)"},
  range: {category: [1, 2, 3, 4, 5, 6].map((i) => `var(--series-${i})`)},
  font: "system-ui, sans-serif",
};

function specOf(element) {
  const {spec, curve} = report.charts[element.dataset.chart];
  const full = structuredClone(spec);
  full.width = "container";
  full.height ??= 200;
  full.autosize = {type: "fit", contains: "padding"};
  if (curve) {
    const share = Number(shareInput.value);
    for (const {transform} of full.layer) {
      const smoothing = transform?.find((one) => one.loess);
      if (smoothing && share) smoothing.bandwidth = share;
      else if (smoothing) transform.pop();
    }
    const isLog = full.data.values.every((one) => one.y.every((y) => y > 0));
    const scale = isLog ? {type: "log"} : {type: "symlog", constant: 0.1, zero: false};
    for (const layer of full.layer) {
      if (logInput.checked && layer.encoding.y) layer.encoding.y.scale = {...scale, nice: true};
    }
  }
  return full;
}

const shareInput = byId("smoothing"), logInput = byId("log");
const charts = [...document.querySelectorAll(".chart")];
const options = {actions: false, config: theme, renderer: "svg"};
let drawing = 0;
// One chart at a time, so that the page can be read and scrolled while the others are drawn.
async function drawAll(onlyCurves) {
  const turn = ++drawing;
  for (const element of charts) {
    if (onlyCurves && !report.charts[element.dataset.chart].curve) continue;
    await vegaEmbed(element, specOf(element), options);
    element.dataset.drawn = "";
    await new Promise((resolve) => setTimeout(resolve));
    if (turn !== drawing) return;
  }
  document.body.dataset.drawn = String(turn);
}
// Who prints at once gets all charts: without a pause, and without tooltips.
addEventListener("beforeprint", () => {
  for (const element of charts) {
    if ("drawn" in element.dataset) continue;
    const compiled = vegaLite.compile(specOf(element), {config: theme}).spec;
    new vega.View(vega.parse(compiled), {renderer: "svg"}).initialize(element).run();
  }
});
function showShare() { byId("smoothing-value").textContent = `${Math.round(Number(shareInput.value) * 100)} %`; }
if (shareInput) {
  shareInput.addEventListener("change", () => drawAll(true));
  shareInput.addEventListener("input", showShare);
  logInput.addEventListener("change", () => drawAll(true));
  showShare();
}

// --------------------------------------------------------------------------------------------- samples

const PAGE = 10;
const several = new Set(report.replies.map((row) => row.run)).size > 1;
let first = 0, current = -1, shown = report.replies;
const gain = (row, name) => (row.ppo[name] ?? 0) - (row.sft[name] ?? 0);

const FILTERS = {
  better: (row) => gain(row, "score") > 0,
  worse: (row) => gain(row, "score") < 0,
  "gold-better": (row) => gain(row, "gold") > 0,
  "gold-worse": (row) => gain(row, "gold") < 0,
  fooled: (row) => gain(row, "score") > 0 && gain(row, "gold") < 0,
};

const KEYS = {
  gain: (row) => gain(row, "score"),
  gold: (row) => gain(row, "gold"),
  kl: (row) => row.ppo.kl ?? 0,
  length: (row) => row.ppo.length ?? row.ppo.reply.length,
};

function select() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = FILTERS[byId("filter").value], run = byId("run") ? byId("run").value : "";
  shown = report.replies.filter((row) => {
    if ((run && row.run !== run) || (chosen && !chosen(row))) return false;
    const text = `${row.prompt} ${row.sft.reply} ${row.ppo.reply}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const order = byId("order").value, key = KEYS[order.replace("-", "")];
  if (key) shown = [...shown].sort((a, b) => (order.startsWith("-") ? key(a) - key(b) : key(b) - key(a)));
  first = 0;
  render();
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tokens(side) {
  const p = element("p");
  if (!side.tokens || !byId("colour").checked) {
    p.textContent = side.reply;
    return p;
  }
  side.tokens.forEach((token, i) => {
    const span = element("span", "", token);
    const kl = side.token_kl[i], strength = Math.round(Math.min(Math.abs(kl) / 2, 1) * 100);
    if (strength > 5) span.style.background = `color-mix(in srgb, var(${kl > 0 ? "--up" : "--down"}) ${strength}%, transparent)`;
    if (strength > 25) span.className = kl > 0 ? "token-up" : "token-down";
    span.title = `${kl.toFixed(2)} nats`;
    p.append(span);
  });
  return p;
}

function sideOf(name, side) {
  const box = element("div", "side");
  box.append(element("h3", "", name), tokens(side));
  const chips = element("div", "chips");
  for (const [key, value] of Object.entries(side)) {
    if (typeof value === "number") chips.append(element("span", "", `${key === "kl" ? "KL" : key} ${Number.isInteger(value) ? value : value.toFixed(2)}`));
  }
  box.append(chips);
  return box;
}

function render() {
  const rows = byId("rows");
  rows.replaceChildren();
  current = -1;
  for (const row of shown.slice(first, first + PAGE)) {
    const card = element("article", "card sample"), sides = element("div", "sides");
    card.tabIndex = -1;
    card.append(element("p", "prompt", several ? `[${row.run}] ${row.prompt.trim()}` : row.prompt.trim()));
    sides.append(sideOf("SFT", row.sft), sideOf("PPO", row.ppo));
    card.append(sides);
    rows.append(card);
  }
  if (!shown.length) rows.append(element("p", "", "No prompt matches."));
  byId("count").textContent = shown.length ? `${first + 1} to ${Math.min(first + PAGE, shown.length)} of ${shown.length}` : "0 of 0";
  byId("previous").disabled = first === 0;
  byId("next").disabled = first + PAGE >= shown.length;
}

function turn(pages) {
  const last = Math.max(0, Math.floor((shown.length - 1) / PAGE) * PAGE);
  const before = first;
  first = Math.min(last, Math.max(0, first + pages * PAGE));
  if (first !== before) render();
  return first !== before;
}

// Move to the next or previous sample, and to the next page behind the last one.
function step(by) {
  const cards = () => byId("rows").querySelectorAll(".sample");
  let next = current + by;
  if (next >= cards().length) {
    if (!turn(1)) return;
    next = 0;
  } else if (next < 0) {
    if (!turn(-1)) return;
    next = PAGE - 1;
  }
  current = next;
  const card = cards()[current];
  card.focus({preventScroll: true});
  card.scrollIntoView({block: "start"});
}

if (byId("rows")) {
  byId("search").addEventListener("input", select);
  for (const name of ["order", "filter", "run"]) if (byId(name)) byId(name).addEventListener("change", select);
  byId("colour").addEventListener("change", render);
  byId("next").addEventListener("click", () => turn(1));
  byId("previous").addEventListener("click", () => turn(-1));
  const keys = {j: () => step(1), k: () => step(-1), n: () => turn(1), p: () => turn(-1), "/": () => byId("search").focus()};
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.blur();
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (Object.hasOwn(keys, event.key)) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  render();
}
drawAll(false);
