// The playground: conversations in this browser, settings, one streamed reply at a time.

import { ApiError, streamChat } from "./api.js";
import { $, el, markdown } from "./dom.js";

const STORE = "jaxserve-chats";
const SETTINGS = "jaxserve-settings";
const MAX_CHATS = 100;
const FIELDS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["top_k", "Top k", 0, null, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_completion_tokens", "Max. tokens", 1, null, 1],
  ["repetition_penalty", "Repetition penalty", 0.01, 100, 0.05],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["seed", "Seed", null, null, 1],
];
const SAVED = ["system", "format", "format-text", "tools", "tool-choice", "stop-texts"];
const HINTS = {
  json: '{\n  "type": "object",\n  "properties": { "city": { "type": "string" } },\n  "required": ["city"]\n}',
  regex: "\\d{4}-\\d{2}-\\d{2}",
  choice: "positive\nnegative",
  grammar: 'root ::= "yes" | "no"',
};
const EXAMPLE_TOOLS = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}], null, 2);

let chats = read(STORE, []).map((chat) => ({ ...newChat(), ...chat }));
let pictures = [];  // of the next message, as data: URLs
let current = null;
let running = null;
let onKeyNeeded = () => {};

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value, (key, part) => (key === "images" ? undefined : part)));
  } catch {
    notify("This browser has no space left for the history.");
  }
}

function newChat() {
  return { id: `${Date.now()}-${Math.random()}`, messages: [] };
}

// Other tabs write the whole list too: take theirs, and keep the conversation that is shown here.
function takeChats(event) {
  if (event.key !== STORE) return;
  chats = read(STORE, []).map((chat) => (chat.id === current.id ? current : chat));
  showChats();
}

function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  return first ? first.content.slice(0, 60) : "New chat";
}

function save() {
  if (current.messages.length && !chats.some((chat) => chat.id === current.id)) chats.unshift(current);
  chats = chats.slice(0, MAX_CHATS);
  write(STORE, chats);
  showChats();
}

function showChats() {
  $("conversations").replaceChildren(...chats.map((chat) => el("li", {},
    el("button", { type: "button", title: titleOf(chat), "aria-current": String(chat === current), onclick: () => open(chat) }, titleOf(chat)),
    el("button", { type: "button", "aria-label": `Delete ${titleOf(chat)}`, onclick: () => remove(chat) }, "×"))));
}

function remove(chat) {
  chats = chats.filter((one) => one !== chat);
  write(STORE, chats);
  if (chat === current) open(newChat());
  else showChats();
}

function open(chat) {
  stop();
  current = chat;
  notify("");
  showChats();
  showMessages();
  $("prompt").focus();
}

function showMessages() {
  const shown = current.messages.map(messageNode);
  const empty = el("p", { className: "empty" }, "Ask the model something. Settings are on the right; the Engine tab shows what the server does.");
  $("messages").replaceChildren(...(shown.length ? shown : [empty]));
  $("again").disabled = !current.messages.length;
  scroll();
}

function scroll() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function messageNode(message, index) {
  const who = { user: "You", assistant: "Model", tool: `Result of ${message.name ?? "a call"}` }[message.role];
  const body = el("div", { className: "body" });
  const node = el("article", { className: `message ${message.role}`, "aria-label": who }, el("div", { className: "who" }, who), body);
  fill(body, message);
  if (message.role === "assistant") node.append(tail(message));
  if (message.role === "user") {
    node.append(el("div", { className: "tail" }, el("button", { type: "button", onclick: () => edit(index) }, "Edit")));
  }
  if (message.tool_calls && index === current.messages.length - 1) node.append(resultForm(message));
  return node;
}

function fill(body, message) {
  if (message.role !== "assistant") {
    const shown = message.images?.length ? [el("div", {}, ...message.images.map(thumbnail))] : [];
    body.replaceChildren(...shown, message.content);
    return;
  }
  const nodes = [];
  if (message.reasoning) {
    const isOpen = body.querySelector("details")?.open ?? !message.content;
    nodes.push(el("details", { open: isOpen }, el("summary", {}, "Reasoning"), el("div", { className: "thoughts" }, message.reasoning)));
  }
  nodes.push(...markdown(message.content ?? ""));
  for (const call of message.tool_calls ?? []) {
    nodes.push(el("div", { className: "call" }, el("strong", {}, call.function.name), el("pre", { tabIndex: 0 }, el("code", {}, call.function.arguments))));
  }
  body.replaceChildren(...nodes);
}

function thumbnail(url, index) {
  return el("img", { src: url, alt: `Picture ${index + 1}`, className: "picture" });
}

function showPictures() {
  const drop = (url) => { pictures = pictures.filter((one) => one !== url); showPictures(); };
  $("pictures").replaceChildren(...pictures.map((url, i) => el("span", {}, thumbnail(url, i),
    el("button", { type: "button", "aria-label": `Remove picture ${i + 1}`, onclick: () => drop(url) }, "×"))));
}

async function addPictures(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  const urls = images.map((file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  }));
  try {
    pictures.push(...await Promise.all(urls));
  } catch {
    notify("The picture cannot be read.");
  }
  showPictures();
  $("prompt").focus();
}

function acceptPictures() {
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  $("chat").addEventListener("dragover", (event) => { if (isFile(event)) event.preventDefault(); });
  $("chat").addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    addPictures(event.dataTransfer.files);
  });
  $("prompt").addEventListener("paste", (event) => addPictures(event.clipboardData.files));
  $("add-picture").addEventListener("click", () => $("picture-file").click());
  $("picture-file").addEventListener("change", () => {
    addPictures($("picture-file").files);
    $("picture-file").value = "";
  });
}

// The content of a message as the API takes it: its pictures come first.
function contentOf({ content, images }) {
  if (!images?.length) return content;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
}

function tail(message) {
  const copy = el("button", { type: "button", onclick: () => navigator.clipboard?.writeText(message.content ?? "") }, "Copy");
  return el("div", { className: "tail" }, copy, el("span", {}, message.note ?? ""));
}

function edit(index) {
  stop();
  $("prompt").value = current.messages[index].content;
  pictures = current.messages[index].images ?? [];
  showPictures();
  current.messages.length = index;
  save();
  showMessages();
  $("prompt").focus();
}

function resultForm(message) {
  const fields = message.tool_calls.map((call, i) => {
    const box = el("textarea", { rows: 2, id: `result-${i}` });
    return [call, box, el("label", { htmlFor: `result-${i}` }, `Result of ${call.function.name}`)];
  });
  const send = (event) => {
    event.preventDefault();
    for (const [call, box] of fields) {
      current.messages.push({ role: "tool", tool_call_id: call.id, name: call.function.name, content: box.value });
    }
    reply();
  };
  return el("form", { className: "call", onsubmit: send }, ...fields.flatMap(([, box, label]) => [label, box]),
    el("div", { className: "buttons" }, el("button", { className: "primary" }, "Send results")));
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}

function request() {
  const sent = current.messages.map(({ role, tool_calls, tool_call_id, reasoning, ...message }) =>
    ({ role, content: contentOf(message), ...(tool_calls && { tool_calls }), ...(tool_call_id && { tool_call_id }), ...(reasoning && { reasoning }) }));
  const system = $("system").value.trim();
  const body = { model: $("model").value || undefined, messages: system ? [{ role: "system", content: system }, ...sent] : sent };
  for (const [name] of FIELDS) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  const stops = $("stop-texts").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  const [format, text] = [$("format").value, $("format-text").value];
  if (format === "json_object") body.response_format = { type: "json_object" };
  else if (format === "json") body.structured_outputs = { json: parsed(text, "The schema") };
  else if (format === "choice") body.structured_outputs = { choice: text.split("\n").filter(Boolean) };
  else if (format) body.structured_outputs = { [format]: text };
  if ($("tools").value.trim()) {
    body.tools = parsed($("tools").value, "The list of tools");
    body.tool_choice = $("tool-choice").value;
  }
  return body;
}

function take(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.name ?? "";
    call.function.arguments += part.arguments ?? "";
  }
}

function summary(usage, begin, first, reason) {
  const words = [];
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    words.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) words.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    words.push(`prompt ${usage.prompt_tokens} (${usage.prompt_tokens_details.cached_tokens} cached)`);
  }
  if (first) words.push(`first token after ${((first - begin) / 1000).toFixed(2)} s`);
  if (reason === "length") words.push("cut at the length limit");
  return words.join(" · ");
}

async function reply() {
  let body;
  try {
    body = request();
  } catch (error) {
    notify(error.message);
    return;
  }
  notify("");
  const message = { role: "assistant", content: "" };
  current.messages.push(message);
  showMessages();
  const [chat, node] = [current, $("messages").lastElementChild];
  const shown = node.querySelector(".body");
  shown.classList.add("typing");
  setRunning(new AbortController());
  const [mine, begin] = [running, performance.now()];
  let [first, usage, reason, frame] = [0, null, null, 0];
  const draw = () => {
    frame = 0;
    const isAtEnd = $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 80;
    fill(shown, message);
    if (isAtEnd) scroll();
  };
  try {
    await streamChat(body, mine.signal, (chunk) => {
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        reason = choice.finish_reason ?? reason;
        if (!first && (choice.delta.content || choice.delta.reasoning || choice.delta.tool_calls)) first = performance.now();
        take(message, choice.delta);
      }
      frame ||= requestAnimationFrame(draw);
    });
    message.note = summary(usage, begin, first, reason);
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else {
      notify(error instanceof ApiError ? error.message : "The server cannot be reached.");
      if (!message.content && !message.tool_calls) chat.messages.pop();
      if (error.status === 401) onKeyNeeded();
    }
  }
  cancelAnimationFrame(frame);
  const isLast = mine === running;  // a later reply draws into a message of its own
  if (isLast) setRunning(null);
  if (chat === current) {
    save();
    if (isLast) showMessages();
  } else write(STORE, chats);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
}

function stop() {
  running?.abort();
}

function again() {
  stop();
  while (current.messages.length && current.messages.at(-1).role === "assistant") current.messages.pop();
  if (current.messages.length) reply();
}

function ask(event) {
  event?.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  current.messages.push({ role: "user", content: text, ...(pictures.length && { images: pictures }) });
  pictures = [];
  showPictures();
  save();
  reply();
}

function makeFields() {
  const fields = FIELDS.map(([name, label, min, max, step]) => {
    const input = el("input", { type: "number", id: name, placeholder: "default", step: String(step) });
    if (min !== null) input.min = String(min);
    if (max !== null) input.max = String(max);
    return el("div", { className: "field" }, el("label", { htmlFor: name }, label), input);
  });
  const stops = el("textarea", { id: "stop-texts", rows: 2 });
  $("sampling").append(...fields, el("label", { htmlFor: "stop-texts" }, "Stop texts, one per line"), stops);
}

const settingIds = () => [...FIELDS.map(([name]) => name), ...SAVED];

function showFormat() {
  const kind = $("format").value;
  const isText = kind in HINTS;
  $("format-text").hidden = !isText;
  $("format-text").placeholder = HINTS[kind] ?? "";
  if (isText && !$("format-text").value) $("format-text").value = HINTS[kind];
}

export function startChat(keyNeeded) {
  onKeyNeeded = keyNeeded;
  makeFields();
  const saved = read(SETTINGS, {});
  for (const id of settingIds()) {
    if (saved[id] !== undefined) $(id).value = saved[id];
    $(id).addEventListener("change", () => write(SETTINGS, Object.fromEntries(settingIds().map((one) => [one, $(one).value]))));
  }
  showFormat();
  $("format").addEventListener("change", () => { $("format-text").value = ""; showFormat(); });
  $("example-tools").addEventListener("click", () => { $("tools").value = EXAMPLE_TOOLS; $("tools").dispatchEvent(new Event("change")); });
  $("reset").addEventListener("click", () => {
    localStorage.removeItem(SETTINGS);
    for (const id of settingIds()) $(id).value = { "tool-choice": "auto" }[id] ?? "";
    showFormat();
  });
  acceptPictures();
  $("ask").addEventListener("submit", ask);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
  $("stop").addEventListener("click", stop);
  $("again").addEventListener("click", again);
  $("new-chat").addEventListener("click", () => open(newChat()));
  if (chats.length) write(STORE, chats);  // the ids, for other tabs
  addEventListener("storage", takeChats);
  open(chats[0] ?? newChat());
}
