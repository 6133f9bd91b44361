// A conversation over /v1/chat/completions, streamed. Answers are text, never markup.

import { call } from "./api.js";
import { seconds, whole } from "./numbers.js";

const $ = (id) => document.getElementById(id);

let conversation = [];
let running = null;

export function startChat() {
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("chat-stop").addEventListener("click", () => running?.abort());
  $("chat-clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    $("messages").replaceChildren();
    $("prompt").focus();
  });
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  const asked = [...conversation, { role: "user", content: text }];
  bubble("user").text.textContent = text;
  const answer = bubble("assistant");
  const stopping = new AbortController();
  working(stopping, answer);
  try {
    const said = await stream(asked, answer, stopping.signal);
    conversation = [...asked, { role: "assistant", content: said }];
  } catch (error) {
    if (stopping.signal.aborted) answer.note.textContent += " stopped";
    else {
      answer.box.classList.add("failed");
      answer.note.textContent = error.message;
    }
  } finally {
    working(null, answer);
  }
}

function working(controller, answer) {
  running = controller;
  $("chat-send").hidden = running !== null;
  $("chat-stop").hidden = running === null;
  answer.box.classList.toggle("working", running !== null);
}

function bubble(role) {
  $("chat-hint")?.remove();
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const text = document.createElement("span");
  const note = document.createElement("small");
  box.append(text, note);
  $("messages").append(box);
  box.scrollIntoView({ block: "nearest" });
  return { box, text, note };
}

/** The whole answer. Throws an Error with a sentence. */
async function stream(messages, answer, signal) {
  const begun = performance.now();
  const body = {
    messages,
    max_tokens: $("max-tokens").valueAsNumber || 256,
    temperature: Number.isFinite($("temperature").valueAsNumber) ? $("temperature").valueAsNumber : 0.7,
    stream: true,
    stream_options: { include_usage: true },
  };
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  }).catch((error) => {
    throw signal.aborted ? error : new Error("The gateway does not answer.");
  });
  if (!response.ok) throw new Error(await problem(response));
  let said = "";
  let first = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices[0]?.delta?.content ?? "";
    if (piece && first === null) first = performance.now() - begun;
    said += piece;
    show(answer, said);
    if (event.usage) answer.note.textContent = summary(event.usage.completion_tokens, first, performance.now() - begun);
  }
  return said;
}

function show(answer, said) {
  const log = $("messages");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  answer.text.textContent = said;
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function summary(tokens, firstMs, allMs) {
  const first = firstMs === null ? "" : `, the first after ${seconds(firstMs / 1000)}`;
  return `${whole(tokens)} tokens in ${seconds(allMs / 1000)}${first}`;
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered ${response.status}.`;
  }
}

/** The events of a stream, parsed; comments are left out. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
