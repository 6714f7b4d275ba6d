// The node's page. Everything it shows is in GET /admin/overview; it steers by PATCH /admin/lending.
// One file of more than 400 lines: a browser gets it as it stands, without a build and in one request.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const INTERVAL_MS = 1000;
const HISTORY = 120; // points of a chart
const DRY_RUN_MS = 200; // a slider rests so long before the node is asked
const BAR_PX = 20, BORROWED_PX = 10, LABEL_PX = 22, GAP_PX = 30;

const byId = (id) => document.getElementById(id);
const keys = { admin: sessionStorage.getItem("admin") ?? "", api: sessionStorage.getItem("api") ?? "" };
const cards = new Map(); // by model
let before = null; // the view before
let timer = 0;

// ---- asking the node ----

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Return the node's answer; throw an Error that says what is wrong, with `status`. */
async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: { ...headers(keys.admin), ...options.headers }, ...options.request });
  const body = await answer.json();
  if (answer.ok) return body;
  throw failure(body, answer.status);
}

function failure(body, status) {
  return Object.assign(new Error(body.error?.message ?? `status ${status}`), { status });
}

async function look() {
  clearTimeout(timer);
  try {
    const view = await ask("admin/overview");
    byId("keys").hidden = true;
    byId("watched").hidden = false;
    show(view);
    say(`${view.version}, ${view.models.length} models, ${lendingWords(view)}`);
  } catch (error) {
    const isKeyMissing = error.status === 401;
    byId("keys").hidden = !isKeyMissing;
    if (isKeyMissing) byId("watched").hidden = true;
    say(isKeyMissing ? "The node wants its admin key." : `The node does not answer: ${error.message}`, true);
    if (isKeyMissing) return; // until there is another key
  }
  if (!document.hidden) timer = setTimeout(look, INTERVAL_MS);
}

function lendingWords(view) {
  return view.lending_enabled ? `lending over ${view.transport}` : "lending is off";
}

function say(text, isBad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", isBad);
}

// ---- showing a view ----

function show(view) {
  drawPools(view.models);
  for (const model of view.models) {
    if (!cards.has(model.model)) cards.set(model.model, new Card(model));
    cards.get(model.model).update(model, before?.models.find((old) => old.model === model.model), view, before);
  }
  for (const [name, card] of cards) {
    if (!view.models.some((model) => model.model === name)) {
      card.remove();
      cards.delete(name);
    }
  }
  before = view;
}

/** The blocks of a model's pool by state, one entry for each KV group. */
function groupsOf(model) {
  if (model.lending.groups) {
    return model.lending.groups.map((group) => ({
      used: group.used, cached: group.cached, lent: group.lent,
      streaming: group.in_flight + group.staging + group.loading, free: group.free, total: group.total,
    }));
  }
  const blocks = model.figures?.blocks ?? { free: 1, used: 0, cached: 0 };
  return [{ ...blocks, lent: 0, streaming: 0, total: blocks.free + blocks.used + blocks.cached }];
}

function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Every pool as a bar for each KV group, what it borrows as a bar below, and leases as bands from bar to bar. */
function drawPools(models) {
  const width = byId("pools").clientWidth;
  const picture = svg("svg", { role: "img", "aria-label": describePools(models) });
  const bands = svg("g", {});
  picture.append(bands);
  const lentAt = new Map(), borrowedAt = new Map(); // where the bars of what a model lends and borrows lie
  let y = 0;
  for (const model of models) {
    const { pool_bytes: pool, borrowed_bytes: borrowed } = model.lending;
    picture.append(svg("text", { x: 0, y: y + 15 }, model.model));
    const words = `${size(pool)}${borrowed ? ` and ${size(borrowed)} borrowed` : ""}`;
    picture.append(svg("text", { x: width, y: y + 15, "text-anchor": "end", class: "size" }, words));
    y += LABEL_PX;
    groupsOf(model).forEach((group, index) => {
      let x = 0;
      for (const state of ["used", "cached", "streaming", "free", "lent"]) {
        const part = group.total ? (width * group[state]) / group.total : 0;
        picture.append(svg("rect", { x, y, width: Math.max(0, part), height: BAR_PX, class: state }));
        if (state === "lent") lentAt.set(`${model.model}/${index}`, { x, y: y + BAR_PX, width: part, taken: 0 });
        x += part;
      }
      y += BAR_PX + 3;
    });
    if (borrowed) {
      const part = Math.min(width, (width * borrowed) / pool);
      picture.append(svg("rect", { x: 0, y, width: part, height: BORROWED_PX, class: "lent" }));
      borrowedAt.set(model.model, { x: 0, y, width: part, bytes: borrowed, taken: 0 });
      y += BORROWED_PX;
    }
    y += GAP_PX;
  }
  for (const model of models) {
    const lent = model.lending.lent_bytes;
    for (const link of model.lending.lends) {
      const from = lentAt.get(`${link.lender}/${link.lender_group}`), to = borrowedAt.get(link.borrower);
      if (link.lent_bytes && from && to) bands.append(band(from, to, link.lent_bytes, lent));
    }
  }
  picture.setAttribute("height", y - GAP_PX + 4);
  const shown = byId("pools").firstElementChild;
  if (!shown || !moveTo(shown, picture)) byId("pools").replaceChildren(picture);
}

/** Give a drawing the attributes of another with the same elements, so that they move there; else return false. */
function moveTo(shown, wanted) {
  const from = [shown, ...shown.querySelectorAll("*")], to = [wanted, ...wanted.querySelectorAll("*")];
  const isAlike = (element, index) => element.tagName === to[index].tagName && element.classList.value === to[index].classList.value;
  if (from.length !== to.length || !from.every(isAlike)) return false;
  from.forEach((element, index) => {
    for (const { name, value } of to[index].attributes) element.setAttribute(name, value);
    if (element.tagName === "text") element.textContent = to[index].textContent;
  });
  return true;
}

/** A band from the lent part of one bar to the borrowed bar of another, as wide at each end as its part there. */
function band(from, to, bytes, lentBytes) {
  const fromWidth = (from.width * bytes) / lentBytes, toWidth = (to.width * bytes) / to.bytes;
  const a = from.x + from.taken, b = to.x + to.taken;
  from.taken += fromWidth;
  to.taken += toWidth;
  const isBelow = to.y > from.y;
  const fromY = isBelow ? from.y : from.y - BAR_PX, toY = isBelow ? to.y : to.y + BORROWED_PX;
  const middle = (fromY + toY) / 2;
  const left = `M${a},${fromY} C${a},${middle} ${b},${middle} ${b},${toY}`;
  const right = `C${b + toWidth},${middle} ${a + fromWidth},${middle} ${a + fromWidth},${fromY}`;
  return svg("path", { class: "band", d: `${left} L${b + toWidth},${toY} ${right} Z` });
}

function describePools(models) {
  return models.map((model) => {
    const { pool_bytes, lent_bytes, borrowed_bytes } = model.lending;
    const groups = groupsOf(model);
    const part = (state) => {
      const total = groups.reduce((sum, group) => sum + group.total, 0);
      return percent(groups.reduce((sum, group) => sum + group[state], 0), total);
    };
    return `${model.model}: pool of ${size(pool_bytes)}, ${part("used")} in use, ${part("cached")} cached, ` +
      `${size(lent_bytes ?? 0)} lent, ${size(borrowed_bytes ?? 0)} borrowed.`;
  }).join(" ");
}

/** One model: its state and figures, its charts, and the budget of a worker. */
class Card {
  constructor(model) {
    this.name = model.model;
    this.element = byId("model").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h3").textContent = this.name;
    this.charts = new Map();
    this.slider = this.element.querySelector("input[type=range]");
    this.effect = this.element.querySelector(".effect");
    this.isHeld = false; // while somebody moves the slider
    this.slider.addEventListener("input", () => this.weigh());
    this.slider.addEventListener("change", () => this.apply());
    byId("models").append(this.element);
    byId("talk-model").append(new Option(this.name, this.name));
  }

  remove() {
    this.element.remove();
    [...byId("talk-model").options].find((option) => option.value === this.name)?.remove();
  }

  update(model, old, view, oldView) {
    const { engine, figures, lending } = model;
    const state = this.element.querySelector(".state");
    const more = [engine.why, engine.loading && loadingWords(engine.loading)].filter(Boolean).join("; ");
    state.textContent = `${lending.role}, ${engine.state}${more ? `: ${more}` : ""}`;
    state.classList.toggle("bad", !["ready", "slow", "asleep"].includes(engine.state));
    const recalls = Object.entries(lending.recalls ?? {}).filter(([, count]) => count).map(([reason, count]) => `${count} ${reason}`);
    this.list([
      ["running, waiting", figures ? `${figures.running}, ${figures.waiting}` : "–"],
      ["in the cache", figures ? hitWords(figures) : "–"],
      ["recalls", recalls.join(", ") || "none"],
      ["restarts", engine.restarts],
    ]);
    const seconds = oldView ? view.time_s - oldView.time_s : 0;
    const rate = (key) => (old?.figures && figures && seconds > 0 ? Math.max(0, (figures[key] - old.figures[key]) / seconds) : null);
    this.chart("tokens/s", rate("generation_tokens_total") ?? 0, (value) => value.toFixed(0));
    this.chart("prompt tokens/s", rate("prompt_tokens_total") ?? 0, (value) => value.toFixed(0));
    this.chart("first token", mean(model.first_token, old?.first_token), duration);
    this.chart("per token", mean(model.between_tokens, old?.between_tokens), duration);
    this.pool = lending.pool_bytes;
    this.element.querySelector(".budget").hidden = lending.budget_bytes === null;
    if (lending.budget_bytes !== null && !this.isHeld) {
      this.slider.value = Math.round((100 * lending.budget_bytes) / lending.pool_bytes);
      this.label(lending.budget_bytes);
    }
  }

  list(entries) {
    const list = this.element.querySelector("dl");
    list.replaceChildren(...entries.flatMap(([term, value]) => {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term;
      dd.textContent = value;
      return [dt, dd];
    }));
  }

  /** Add a point to a chart; `null` is none, and what was last shown stays. */
  chart(title, value, words) {
    if (!this.charts.has(title)) {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const path = svg("path", { class: "spark" });
      const drawing = svg("svg", { viewBox: `0 0 ${HISTORY - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" });
      drawing.append(path);
      figure.append(caption, drawing);
      this.element.querySelector(".charts").append(figure);
      this.charts.set(title, { caption, path, points: [], last: null });
    }
    const chart = this.charts.get(title);
    chart.last = value ?? chart.last;
    chart.points.push(chart.last ?? 0);
    chart.points.splice(0, chart.points.length - HISTORY);
    const most = Math.max(...chart.points) || 1;
    const start = HISTORY - chart.points.length;
    const at = (point, index) => `${start + index},${29 - (28 * point) / most}`;
    chart.path.setAttribute("d", `M${chart.points.map(at).join(" L")}`);
    chart.caption.textContent = `${title}: ${chart.last === null ? "–" : words(chart.last)}`;
  }

  label(bytes) {
    this.element.querySelector("output").textContent = `${size(bytes)} of ${size(this.pool)}`;
  }

  /** Say what this budget would take back, before it is let go. */
  weigh() {
    this.isHeld = true;
    this.label((this.pool * this.slider.value) / 100);
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.set(true), DRY_RUN_MS);
  }

  async apply() {
    clearTimeout(this.asking);
    await this.set(false);
    this.isHeld = false;
  }

  async set(isDryRun) {
    const body = JSON.stringify({ budget: this.slider.value === "0" ? "0" : `${this.slider.value}%` });
    const path = `admin/lending/${encodeURIComponent(this.name)}?dry_run=${isDryRun}`;
    try {
      const change = await ask(path, {
        headers: { "Content-Type": "application/json" }, request: { method: "PATCH", body },
      });
      const back = size(change.recalled_bytes);
      if (isDryRun) this.effect.textContent = `${back} would be taken back`;
      else this.effect.textContent = change.recalled_bytes ? `${back} came back in ${duration(change.took_s)}` : "set";
    } catch (error) {
      this.effect.textContent = error.message;
    }
  }
}

function loadingWords({ loaded_bytes, total_bytes, left_s }) {
  const left = left_s === null ? "" : `, ${duration(left_s)} left`;
  return `${size(loaded_bytes)} of ${size(total_bytes)} of weights loaded${left}`;
}

function hitWords(figures) {
  const asked = figures.prefix_query_tokens_total;
  const found = Object.entries(figures.prefix_hit_tokens_total).filter(([, tokens]) => tokens);
  return found.map(([place, tokens]) => `${percent(tokens, asked)} ${place}`).join(", ") || "nothing yet";
}

/** The mean wait since the view before; null if nobody waited. */
function mean(now, old) {
  const count = now.count - (old?.count ?? now.count);
  return count > 0 ? (now.total_s - old.total_s) / count : null;
}

function percent(part, whole) {
  return `${whole ? Math.round((100 * part) / whole) : 0} %`;
}

function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function duration(seconds) {
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

// ---- talking to a model ----

const STREAMED = { stream: true, stream_options: { include_usage: true }, return_cached_tokens_details: true };
let messages = [];
let aborter = null;

function bubble(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  byId("conversation").append(item);
  return item;
}

/** Yield the objects of a stream of server-sent events. */
async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function send(event) {
  event.preventDefault();
  const model = byId("talk-model").value, content = byId("talk-message").value;
  messages.push({ role: "user", content });
  bubble("user", content);
  const answer = bubble("assistant", "");
  const thought = document.createElement("em"), said = document.createElement("span");
  answer.append(thought, said);
  byId("talk-send").disabled = true;
  byId("talk-stop").disabled = false;
  aborter = new AbortController();
  try {
    await stream(model, thought, said);
  } catch (error) {
    if (error.name !== "AbortError") byId("talk-figures").textContent = error.message;
    if (error.status === 401) byId("keys").hidden = false;
  }
  messages.push({ role: "assistant", content: said.textContent });
  byId("talk-send").disabled = false;
  byId("talk-stop").disabled = true;
}

async function stream(model, thought, said) {
  const started = performance.now();
  let first = null, usage = null;
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal: aborter.signal,
    headers: { "Content-Type": "application/json", ...headers(keys.api) },
    body: JSON.stringify({ model, messages, ...STREAMED }),
  });
  if (!response.ok) throw failure(await response.json(), response.status);
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    first ??= performance.now();
    const delta = chunk.choices[0]?.delta;
    thought.textContent += delta?.reasoning_content ?? "";
    said.textContent += delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  if (usage === null) return;
  byId("talk-figures").textContent = `first token after ${duration((first - started) / 1000)}, ` +
    `${usage.prompt_tokens} tokens of prompt${cachedWords(usage)}; ${usage.completion_tokens} tokens of answer`;
}

/** Say how much of a prompt was in the cache, and where. */
function cachedWords({ prompt_tokens_details: details }) {
  if (!details) return "";
  const places = Object.entries(details.cached_tokens_details ?? {}).filter(([, tokens]) => tokens);
  const words = places.map(([place, tokens]) => `${tokens} ${place}`).join(", ");
  return `, ${details.cached_tokens} of them from the cache${words ? ` (${words})` : ""}`;
}

function newConversation() {
  aborter?.abort();
  messages = [];
  byId("conversation").replaceChildren();
  byId("talk-figures").textContent = "";
}

// ---- beginning ----

function keep(admin, api) {
  Object.assign(keys, { admin, api });
  sessionStorage.setItem("admin", admin);
  sessionStorage.setItem("api", api);
}

function begin() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) { // it stays out of the address that is shown, remembered and copied
    keep(given, keys.api);
    history.replaceState(null, "", location.pathname);
  }
  byId("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    keep(byId("admin-key").value || keys.admin, byId("api-key").value || keys.api);
    look();
  });
  byId("talk").addEventListener("submit", send);
  byId("talk-stop").addEventListener("click", () => aborter?.abort());
  byId("talk-new").addEventListener("click", newConversation);
  document.addEventListener("visibilitychange", () => document.hidden || look());
  window.addEventListener("resize", () => before && drawPools(before.models));
  look();
}

begin();
