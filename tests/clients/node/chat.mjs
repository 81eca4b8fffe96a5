// The official SDK for Node against the server that the environment names; prints what it saw as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.SERVER_URL}/v1`, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const tools = ["get_weather", "now"].map((name) => ({
  type: "function",
  function: { name, parameters: { type: "object" } },
}));
const asked = process.argv[2];

async function chat() {
  const options = { model, messages, temperature: 0 };
  const plain = await client.chat.completions.create(options);
  const deltas = [];
  let usage = null;
  const stream = await client.chat.completions.create({
    ...options,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    for (const choice of chunk.choices) deltas.push(choice.delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  const models = [];
  for await (const listed of client.models.list()) models.push(listed.id);
  return { plain: plain.choices[0].message.content, deltas, usage, plainUsage: plain.usage, models };
}

async function abandon() {
  const stream = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 900 });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) break; // ends the request
  }
  return { aborted: stream.controller.signal.aborted };
}

async function call() {
  const options = { model, messages, tools };
  const plain = await client.chat.completions.create(options);
  const final = await client.chat.completions.stream(options).finalChatCompletion();
  const show = ({ message, finish_reason }) => ({
    finish_reason,
    content: message.content,
    calls: message.tool_calls.map((one) => [one.function.name, JSON.parse(one.function.arguments)]),
  });
  return { plain: show(plain.choices[0]), streamed: show(final.choices[0]) };
}

async function respond() {
  const options = { model, input: messages[0].content, temperature: 0 };
  const plain = await client.responses.create(options);
  const deltas = [];
  const stream = client.responses.stream(options).on("response.output_text.delta", ({ delta }) => deltas.push(delta));
  const final = await stream.finalResponse();
  return { plain: plain.output_text, deltas, final: final.output_text, status: final.status };
}

async function embed() {
  const input = ["A cat sleeps.", "Shares fell."];
  const { data } = await client.embeddings.create({ model, input }); // asks for base64 by itself
  const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
  return { sizes: data.map((one) => one.embedding.length), first: [data[0].embedding[0], floats.data[0].embedding[0]] };
}

async function errors() {
  const failures = [
    client.chat.completions.create({ model: "gpt-9", messages }),
    client.chat.completions.create({ model, messages, web_search_options: {} }),
    client.withOptions({ apiKey: "sk-wrong" }).models.list(),
  ];
  const seen = await Promise.allSettled(failures);
  return seen.map(({ reason }) => [reason.constructor.name, reason.status, reason.code]);
}

console.log(JSON.stringify(await { chat, abandon, call, respond, embed, errors }[asked]()));
