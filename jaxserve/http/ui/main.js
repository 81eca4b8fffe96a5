// Tabs, key, model list and status; the views are in chat.js and engine.js.

import { ApiError, getJson, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { $, el } from "./dom.js";
import { showEngine, startEngine } from "./engine.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab) {
  for (const one of tabs) {
    const isChosen = one === tab;
    one.setAttribute("aria-selected", String(isChosen));
    one.tabIndex = isChosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isChosen;
  }
  showEngine(tab.id === "tab-engine");
  history.replaceState(null, "", tab.id === "tab-engine" ? "#engine" : "#chat");
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const next = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    select(next);
    next.focus();
  });
}

export function askForKey() {
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-button").addEventListener("click", askForKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue === "ok") {
    setKey($("key").value.trim());
    refresh();
  }
  $("key").value = "";
});

function showStatus(text, kind) {
  $("status").textContent = text;
  $("status").className = `pill ${kind}`;
}

let timer = 0;

async function refresh() {
  clearTimeout(timer);
  let wait = 5000;
  try {
    const { data } = await getJson("v1/models");
    const names = data.map((model) => model.id);
    if (names.join() !== [...$("model").options].map((option) => option.value).join()) {
      $("model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    }
    const response = await fetch("health", { cache: "no-store" });
    const health = await response.json();
    const progress = health.phase ? ` ${health.phase} ${health.done}/${health.total}` : "";
    showStatus(response.ok ? "ready" : `${health.status}${progress}`, response.ok ? "ok" : "bad");
    if (!response.ok) wait = 1000;
  } catch (error) {
    const isLocked = error instanceof ApiError && error.status === 401;
    showStatus(isLocked ? "key needed" : "not reachable", "bad");
    if (isLocked) askForKey();
    if (isLocked) return;
  }
  timer = setTimeout(refresh, wait);
}

startChat(askForKey);
startEngine();
select(location.hash === "#engine" ? $("tab-engine") : $("tab-chat"));
refresh();
