// The live picture: numbers of the chosen model, twice a second, and what changed between two of them.

import { getJson } from "./api.js";
import { $, el, svg } from "./dom.js";

const PERIOD_MS = 500;
const MAX_POINTS = 120;
const [WIDTH, HEIGHT] = [480, 110];

let isShown = false;
let timer = 0;
let last = null;
let hasStartup = false;
let shownModel = "";
const points = [];

const ofModel = (path) => (shownModel ? `${path}?model=${encodeURIComponent(shownModel)}` : path);

// Begins the picture anew if another model is chosen.
function followModel() {
  if ($("model").value === shownModel) return;
  shownModel = $("model").value;
  last = null;
  hasStartup = false;
  points.length = 0;
}

const format = (value, digits = 0) => value.toLocaleString(undefined, { maximumFractionDigits: digits });
const percent = (value) => `${format(100 * value, 1)} %`;
const milliseconds = (value) => (value === null ? "–" : value < 1 ? `${format(1000 * value, 1)} ms` : `${format(value, 2)} s`);
const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);

function change(now, before, name) {
  return Math.max(0, now.numbers[name] - before.numbers[name]);
}

function mean(now, before, name) {
  const count = now.times[name].count - before.times[name].count;
  return count > 0 ? (now.times[name].seconds - before.times[name].seconds) / count : null;
}

function pointOf(now, before) {
  const steps = Math.max(0, sum(now.steps) - sum(before.steps));
  const perStep = (value) => (steps ? value / steps : 0);
  const cached = change(now, before, "prefix_cache_hits");
  return {
    steps,
    seconds: now.uptime_seconds - before.uptime_seconds,
    decode: perStep(change(now, before, "generation_tokens")),
    prefill: perStep(Math.max(0, change(now, before, "prompt_tokens") - cached)),
    padding: perStep(change(now, before, "padding_tokens")),
    generated: change(now, before, "generation_tokens"),
    kv: now.numbers.kv_cache_usage,
    running: now.numbers.running,
    waiting: now.numbers.waiting,
    ttft: mean(now, before, "time_to_first_token"),
    itl: mean(now, before, "inter_token_latency"),
  };
}

function chart(id, label, draw, top, unit) {
  const scale = top > 0 ? (HEIGHT - 16) / top : 0;
  const nodes = draw((i) => (WIDTH * (MAX_POINTS - points.length + i)) / MAX_POINTS, (value) => HEIGHT - value * scale);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }), ...nodes);
  $(id).replaceChildren(el("div", { className: "hint" }, `${label}; top ${unit(top)}`), picture);
  $(id).setAttribute("aria-label", label);
}

function line(values, x, y, name = "line") {
  const parts = values.flatMap((value, i) => (value === null ? [] : [`${x(i + 0.5).toFixed(1)},${y(value).toFixed(1)}`]));
  return svg("polyline", { class: name, points: parts.join(" ") });
}

function bars(x, y) {
  const width = WIDTH / MAX_POINTS;
  return points.flatMap((point, i) => {
    let below = 0;
    return ["decode", "prefill", "padding"].flatMap((kind) => {
      const size = point[kind];
      below += size;
      return size ? [svg("rect", { class: kind, x: x(i), width: width * 0.85, y: y(below), height: y(below - size) - y(below) })] : [];
    });
  });
}

const largest = (values) => Math.max(0, ...values.filter((value) => value !== null));
const latest = (values) => values.findLast((value) => value !== null) ?? null;

function drawCharts() {
  const now = points.at(-1);
  const of = (name) => points.map((point) => point[name]);
  const words = `now ${format(now.decode, 1)} decode, ${format(now.prefill, 1)} prompt, ${format(now.padding, 1)} padding`;
  chart("batches", words, bars, largest(points.map((point) => point.decode + point.prefill + point.padding)), (top) => `${format(top)} tokens`);
  for (const name of ["ttft", "itl"]) {
    chart(name, `last ${milliseconds(latest(of(name)))}`, (x, y) => [line(of(name), x, y)], largest(of(name)), milliseconds);
  }
  chart("kv", `now ${percent(now.kv)}`, (x, y) => [line(of("kv"), x, y)], Math.max(0.01, largest(of("kv"))), percent);
  chart("queue", `now ${now.running} running, ${now.waiting} waiting`,
    (x, y) => [line(of("running"), x, y), line(of("waiting"), x, y, "line second")],
    Math.max(1, largest(of("running")), largest(of("waiting"))), (top) => `${format(top)} requests`);
}

function drawCards(state) {
  const { numbers } = state;
  const recent = points.slice(-6);
  const seconds = recent.reduce((total, point) => total + point.seconds, 0);
  const rate = seconds > 0 ? recent.reduce((total, point) => total + point.generated, 0) / seconds : 0;
  const hits = numbers.prefix_cache_queries ? numbers.prefix_cache_hits / numbers.prefix_cache_queries : 0;
  const info = state.engine;
  const cards = [
    ["tokens/s", format(rate, 1)],
    [info ? `of ${info.max_num_seqs} running` : "running", format(numbers.running)],
    ["waiting", format(numbers.waiting)],
    [info ? `of ${format(info.num_kv_blocks)} KV pages` : "KV pages", info ? format(numbers.kv_cache_usage * info.num_kv_blocks) : "–"],
    ["prefix cache hits", percent(hits)],
    ["preemptions", format(numbers.preemptions)],
    ["compiled while serving", format(state.compilations.serving ?? 0)],
    ["generated tokens", format(numbers.generation_tokens)],
    ["prompt tokens", format(numbers.prompt_tokens)],
    ["engine restarts", format(numbers.engine_restarts)],
    [info ? `${info.num_devices} x ${info.platform}` : "device", info ? `KV ${info.kv_dtype}` : "loading"],
    ["context", info ? format(info.max_model_len) : "–"],
  ];
  $("cards").replaceChildren(...cards.map(([label, value]) => el("div", { className: "card" }, el("b", {}, value), el("span", {}, label))));
}

function table(id, heads, rows, empty) {
  const caption = $(id).querySelector("caption");
  if (!rows.length) rows = [[empty, ...heads.slice(1).map(() => "")]];
  const cell = (tag) => (text, i) => el(tag, { className: typeof rows[0][i] === "number" ? "number" : "", ...(tag === "th" && { scope: "col" }) }, typeof text === "number" ? format(text) : text);
  $(id).replaceChildren(caption, el("thead", {}, el("tr", {}, ...heads.map(cell("th")))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td"))))));
}

function drawTables(state) {
  const programs = Object.entries(state.steps).sort(([, one], [, other]) => other - one);
  table("programs", ["program", "steps"], programs, "no step yet");
  const refused = state.refused.map((one) => [new Date(1000 * one.time).toLocaleTimeString(), String(one.status), one.route, one.param ?? ""]);
  table("refused", ["time", "status", "route", "field"], refused, "none");
}

async function drawStartup() {
  const start = await getJson(ofModel("startup"));
  if (start.status !== "started") return;
  hasStartup = true;
  const total = Math.max(...start.phases.map((phase) => phase.end_seconds), 0.001);
  const row = 22;
  const rows = start.phases.flatMap((phase, i) => [
    svg("rect", { class: "decode", x: 150 + (600 * phase.start_seconds) / total, width: Math.max(2, (600 * phase.seconds) / total), y: i * row + 4, height: row - 8, rx: 2 }),
    svg("text", { x: 0, y: i * row + 15 }, phase.phase),
    svg("text", { x: 760, y: i * row + 15 }, `${phase.seconds.toFixed(1)} s`),
  ]);
  const compiled = start.programs.filter((program) => program.source === "compiled").length;
  const later = start.programs.filter((program) => program.source === "later").length;
  const cached = start.programs.length - compiled - later;
  const label = `${start.start} start in ${start.total_seconds.toFixed(1)} s; ${compiled} programs compiled, ${cached} from the cache${later ? `, ${later} compiled beside requests` : ""}`;
  const picture = svg("svg", { viewBox: `0 0 830 ${start.phases.length * row}`, role: "img", "aria-label": label }, ...rows);
  $("startup").replaceChildren(el("p", { className: "hint" }, label), el("div", { className: "timeline" }, picture));
}

async function poll() {
  clearTimeout(timer);
  if (!isShown) return;
  let wait = PERIOD_MS;
  try {
    followModel();
    const asked = shownModel;
    const state = await getJson(ofModel("ui/state"));
    if (asked !== $("model").value) return void poll();
    if (last && state.uptime_seconds > last.uptime_seconds) {
      points.push(pointOf(state, last));
      if (points.length > MAX_POINTS) points.shift();
    }
    last = state;
    drawCards(state);
    drawTables(state);
    if (points.length) drawCharts();
    if (!hasStartup && state.engine) await drawStartup();
  } catch {
    wait = 2000;
  }
  timer = setTimeout(poll, document.hidden ? 4000 : wait);
}

export function showEngine(shown) {
  isShown = shown;
  if (shown) poll();
}

export function startEngine() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden && isShown) poll(); });
}
