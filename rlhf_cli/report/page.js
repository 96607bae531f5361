"use strict";
// Charts and the samples browser of the report. Everything that it reads is in the element #data.
const report = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------- charts

function movingAverage(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function smooth(values, share) {
  const span = share * values.length;
  if (span <= 0) return values;
  const weight = Math.exp(-1 / span);
  const there = movingAverage(values, weight);
  const back = movingAverage([...values].reverse(), weight).reverse();
  return there.map((value, i) => (value + back[i]) / 2);
}

function rowsOf(series, share) {
  return series.flatMap((one) => {
    const s = smooth(one.y, share);
    return one.x.map((x, i) => ({run: one.run, series: one.series, x, y: one.y[i], s: s[i]}));
  });
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const bright = dark.matches;
  const text = {labelColor: color("--soft"), titleColor: color("--soft"), labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400};
  return {
    background: null,
    view: {stroke: null},
    axis: {...text, gridColor: color("--line"), domainColor: color("--line"), tickColor: color("--line")},
    legend: {labelColor: color("--ink"), titleColor: color("--soft"), symbolStrokeWidth: 2, symbolOpacity: 1},
    text: {color: color("--ink")},
    range: {category: bright
      ? ["#60a5fa", "#fb923c", "#4ade80", "#f472b6", "#c084fc", "#facc15"]
      : ["#1d4ed8", "#c2410c", "#15803d", "#be185d", "#7e22ce", "#a16207"]},
    font: "system-ui, sans-serif",
  };
}

function draw(element, share, log) {
  const {spec, curve} = report.charts[element.dataset.chart];
  const full = structuredClone(spec);
  full.width = "container";
  full.height = 200;
  full.autosize = {type: "fit", contains: "padding"};
  if (curve) {
    full.data = {values: rowsOf(spec.usermeta.series, share)};
    for (const layer of full.layer) {
      if (log && layer.encoding.y) layer.encoding.y.scale = {type: "symlog", constant: 0.1, zero: false};
    }
  }
  delete full.usermeta;
  return vegaEmbed(element, full, {actions: false, config: theme(), renderer: "svg"});
}

const shareInput = byId("smoothing"), logInput = byId("log");
function share() { return shareInput ? Number(shareInput.value) : report.smoothing; }
function drawAll(onlyCurves) {
  if (shareInput) byId("smoothing-value").textContent = `${Math.round(share() * 100)} %`;
  for (const element of document.querySelectorAll(".chart")) {
    if (!onlyCurves || report.charts[element.dataset.chart].curve) draw(element, share(), logInput && logInput.checked);
  }
}
if (shareInput) {
  shareInput.value = report.smoothing;
  shareInput.addEventListener("change", () => drawAll(true));
  shareInput.addEventListener("input", () => { byId("smoothing-value").textContent = `${Math.round(share() * 100)} %`; });
  logInput.addEventListener("change", () => drawAll(true));
}
dark.addEventListener("change", () => drawAll(false));
drawAll(false);

// --------------------------------------------------------------------------------------------- samples

const PAGE = 10;
let first = 0, shown = report.replies;

const KEYS = {
  gain: (row) => row.ppo.score - row.sft.score,
  gold: (row) => (row.ppo.gold ?? 0) - (row.sft.gold ?? 0),
  kl: (row) => row.ppo.kl ?? 0,
  length: (row) => row.ppo.length ?? row.ppo.reply.length,
};

function select() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = report.replies.filter((row) => {
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
    const strength = Math.min(Math.abs(side.token_kl[i]) / 2, 1) * 0.55;
    if (strength > 0.03) span.style.background = side.token_kl[i] > 0 ? `rgba(249, 115, 22, ${strength})` : `rgba(59, 130, 246, ${strength})`;
    span.title = `${side.token_kl[i].toFixed(2)} nats`;
    p.append(span);
  });
  return p;
}

function sideOf(name, side) {
  const box = element("div", "side");
  box.append(element("h3", "", name), tokens(side));
  const chips = element("div", "chips");
  for (const [key, value] of Object.entries(side)) {
    if (typeof value === "number") chips.append(element("span", "", `${key} ${Number.isInteger(value) ? value : value.toFixed(2)}`));
  }
  box.append(chips);
  return box;
}

function render() {
  const rows = byId("rows");
  rows.replaceChildren();
  for (const row of shown.slice(first, first + PAGE)) {
    const card = element("article", "card sample"), sides = element("div", "sides");
    const several = new Set(report.replies.map((r) => r.run)).size > 1;
    card.append(element("p", "prompt", several ? `[${row.run}] ${row.prompt.trim()}` : row.prompt.trim()));
    sides.append(sideOf("SFT", row.sft), sideOf("PPO", row.ppo));
    card.append(sides);
    rows.append(card);
  }
  byId("count").textContent = shown.length ? `${first + 1} to ${Math.min(first + PAGE, shown.length)} of ${shown.length}` : "none";
}

function turn(pages) {
  const last = Math.max(0, Math.floor((shown.length - 1) / PAGE) * PAGE);
  first = Math.min(last, Math.max(0, first + pages * PAGE));
  render();
}

if (byId("rows")) {
  byId("search").addEventListener("input", select);
  byId("order").addEventListener("change", select);
  byId("colour").addEventListener("change", render);
  byId("next").addEventListener("click", () => turn(1));
  byId("previous").addEventListener("click", () => turn(-1));
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input[type=search], select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") turn(1);
    else if (event.key === "k") turn(-1);
    else if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  });
  render();
}
