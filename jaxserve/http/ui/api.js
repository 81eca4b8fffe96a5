// Requests to the server. All URLs are relative to the page, so that it works below a path prefix.

const KEY = "jaxserve-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function checked(response) {
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.reason ?? message;
  } catch { /* no JSON: the status says it */ }
  throw new ApiError(response.status, message);
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

// Sends a chat and calls `onChunk` with every chunk of its stream.
export async function streamChat(body, signal, onChunk) {
  const response = await checked(await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(response.status, chunk.error.message);
      onChunk(chunk);
    }
  }
}
