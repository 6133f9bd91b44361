// Asks for the state once a second while somebody looks, and draws it. What comes from outside is only ever text.

import { call, hasKey, onKeyWanted, setKey } from "./api.js";
import { drawLines, drawMap } from "./charts.js";
import { startChat } from "./chat.js";
import { bytes, quantile, seconds, whole } from "./numbers.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 8000;
const SHOWN_S = 120;
const LATENCY_S = 60;
const LATENCIES = [["time_to_first_token", "First token"], ["inter_token", "Next token"], ["end_to_end", "Whole answer"]];
const FAILURES = new Set(["timeout", "rejected", "error"]);

/** Looks of the last `SHOWN_S` seconds, oldest first. */
let looks = [];
let wake = () => {};

const $ = (id) => document.getElementById(id);

function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function cell(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

// --- what is shown

function drawStatus(state) {
  const { connected, ready, detail } = state.scheduler;
  const away = state.pipeline === null;
  const kind = ready && !away ? "good" : connected ? "warn" : "bad";
  $("status").dataset.kind = kind;
  put("status-text", kind === "good" ? "Serving" : kind === "warn" ? "Not ready" : "Scheduler away");
  const why = !connected ? `The scheduler is away: ${detail}.` : away ? "The scheduler does not answer." : detail ? `Not ready: ${detail}.` : "";
  notice(why && `${why} Figures below are the last ones known.`);
  $("figures").classList.toggle("stale", away);
  put("model", state.model + (state.scheduler.max_model_len ? ` · ${whole(state.scheduler.max_model_len)} tokens` : ""));
}

function notice(text) {
  $("notice").hidden = !text;
  put("notice", text);
}

function drawLevels(pipeline) {
  const most = Math.max(1, ...pipeline.levels.map((level) => level.waiting + level.running));
  const body = $("levels");
  while (body.children.length > pipeline.levels.length) body.lastChild.remove();
  while (body.children.length < pipeline.levels.length) {
    const row = document.createElement("tr");
    const bar = document.createElement("td");
    const inner = cell("div", "", "bar");
    inner.append(cell("i", "", "running"), cell("i", "", "waiting"));
    bar.append(inner);
    row.append(cell("td", ""), cell("td", ""), bar, cell("td", ""), cell("td", ""));
    body.append(row);
  }
  pipeline.levels.forEach((level, i) => {
    const [name, quantum, bar, running, waiting] = body.children[i].children;
    name.textContent = level.level;
    quantum.textContent = level.quantum_ms ? seconds(level.quantum_ms / 1000) : "–";
    running.textContent = whole(level.running);
    waiting.textContent = whole(level.waiting);
    running.className = level.running ? "" : "none";
    waiting.className = level.waiting ? "" : "none";
    bar.firstChild.children[0].style.width = `${(level.running / most) * 100}%`;
    bar.firstChild.children[1].style.width = `${(level.waiting / most) * 100}%`;
  });
}

function drawStages(stages) {
  const items = stages.map((stage) => {
    const item = cell("li", "", stage.up ? "up" : "down");
    item.append(
      cell("span", "", "dot"),
      cell("span", `Stage ${stage.stage} ${stage.up ? "up" : "down"}`),
      cell("b", stage.last_iteration_ms ? seconds(stage.last_iteration_ms / 1000) : "–"),
      cell("small", stage.address || "nobody is there"),
    );
    return item;
  });
  $("stages").replaceChildren(...items);
}

function drawBlocks(name, blocks) {
  const used = blocks.total - blocks.free;
  const text = blocks.total ? `${whole(used)} of ${whole(blocks.total)} blocks, ${Math.round((used / blocks.total) * 100)} %` : "none";
  put(`${name}-text`, text);
  $(`${name}-map`).setAttribute("aria-label", `${name}: ${text}`);
  drawMap($(`${name}-map`), used, blocks.total);
}

function drawOutcomes(gateway) {
  const rows = Object.entries(gateway.outcomes).map(([name, count]) => [name, count]);
  const most = Math.max(1, ...rows.map(([, count]) => count));
  const body = rows.map(([name, count]) => {
    const row = document.createElement("tr");
    const bar = document.createElement("td");
    const inner = cell("div", "", "bar");
    const part = cell("i", "", "running");
    part.style.width = `${(count / most) * 100}%`;
    inner.append(part);
    bar.append(inner);
    row.append(cell("td", name), bar, cell("td", whole(count), FAILURES.has(name) && count ? "failed" : ""));
    return row;
  });
  $("outcomes").replaceChildren(...body);
}

/** Per second between looks; null across a restart of the scheduler, and where a look has nothing. */
function rates(read) {
  return looks.slice(1).map((now, i) => {
    const before = looks[i];
    const same = now.pipeline && before.pipeline && now.scheduler.generation === before.scheduler.generation;
    const grown = same ? read(now.pipeline) - read(before.pipeline) : -1;
    return [now.time, grown >= 0 ? grown / (now.time - before.time) : null];
  });
}

function latest(points) {
  return points.length ? points[points.length - 1][1] : null;
}

function drawRates(nowS) {
  const tokens = rates((pipeline) => pipeline.tokens_generated);
  const out = rates((pipeline) => pipeline.swaps.out_bytes);
  const into = rates((pipeline) => pipeline.swaps.into_bytes);
  const perS = (value, show) => (value === null ? "–" : show(value));
  put("tokens-per-s", perS(latest(tokens), whole));
  put("swap-out", perS(latest(out), (value) => `${bytes(value)}/s`));
  put("swap-in", perS(latest(into), (value) => `${bytes(value)}/s`));
  const showBytes = (value) => `${bytes(value)}/s`;
  label("swap-chart", "Swap traffic", drawLines($("swap-chart"), [{ kind: "out", points: out }, { kind: "in", points: into }], nowS, SHOWN_S, showBytes, 1024));
  label("token-chart", "Tokens per second", drawLines($("token-chart"), [{ kind: "running", points: tokens }], nowS, SHOWN_S, whole));
}

/** The chart's scale, beside it and for those who do not see it. */
function label(id, what, top) {
  const chart = $(id);
  chart.setAttribute("aria-label", `${what} over the last two minutes, up to ${top}`);
  chart.parentElement.dataset.top = top;
}

function drawLatency(state) {
  const since = looks.find((look) => look.time >= state.time - LATENCY_S) ?? null;
  const first = since && LATENCIES.every(([name]) => since.latency[name].counts.every((count, i) => count <= state.latency[name].counts[i])) ? since : null;
  const rows = LATENCIES.map(([name, title]) => {
    const values = [0.5, 0.9, 0.99].map((share) => quantile(state.latency[name], first && first !== state ? first.latency[name] : null, share));
    const row = document.createElement("tr");
    row.append(cell("td", title), ...values.map((value) => cell("td", seconds(value))));
    return [values, row];
  });
  $("latency").replaceChildren(...rows.map(([, row]) => row));
  put("ttft-p50", seconds(rows[0][0][0]));
  put("itl-p50", seconds(rows[1][0][0]));
}

function draw(state) {
  drawStatus(state);
  drawOutcomes(state.gateway);
  drawLatency(state);
  drawRates(state.time);
  put("updated", `Updated ${new Date(state.time * 1000).toLocaleTimeString()}`);
  if (state.pipeline === null) return;
  const pipeline = state.pipeline;
  put("policy", pipeline.policy);
  for (const name of ["running", "waiting", "preemptions", "promotions", "demotions", "iterations", "swapped"]) put(name, whole(pipeline[name]));
  put("batches", whole(pipeline.batches_in_flight));
  put("longest-wait", seconds(pipeline.longest_wait_ms / 1000));
  put("swaps-in-flight", whole(pipeline.swaps.in_flight));
  put("swap-count", whole(pipeline.swaps.out + pipeline.swaps.into));
  drawLevels(pipeline);
  drawStages(pipeline.stages);
  drawBlocks("device", pipeline.device_blocks);
  drawBlocks("host", pipeline.host_blocks);
}

// --- asking

async function look() {
  const response = await call("/dashboard/state", { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (response.status === 401) return;
  if (!response.ok) throw new Error(`the gateway answered ${response.status}`);
  const state = await response.json();
  $("key-form").hidden = true;
  if (looks.length && looks[looks.length - 1].time === state.time) return;
  looks = [...looks.filter((old) => old.time > state.time - SHOWN_S && old.time < state.time), state];
  draw(state);
}

async function run() {
  for (;;) {
    if (!document.hidden && $("key-form").hidden) {
      try {
        await look();
      } catch {
        $("status").dataset.kind = "bad";
        put("status-text", "Gateway away");
        $("figures").classList.add("stale");
        notice("The gateway does not answer; trying again.");
      }
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, PERIOD_MS);
    });
  }
}

function askForKey() {
  $("key-button").hidden = false;
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("status").dataset.kind = "warn";
  put("status-text", hasKey() ? "Key not valid" : "Key wanted");
  $("key").focus();
}

onKeyWanted(askForKey);
$("key-button").addEventListener("click", askForKey);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  wake();
});
document.addEventListener("visibilitychange", () => wake());
startChat();
run();
