// The Vercel AI SDK against the server that the environment names; prints what it saw as one line of JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would be printed

const [, , provider, ...asked] = process.argv;
const options = { baseURL: `${process.env.SERVER_URL}/v1`, apiKey: process.env.API_KEY };
const providers = {
  anthropic: () => createAnthropic(options),
  "openai-compatible": () =>
    createOpenAICompatible({ name: "jaxserve", includeUsage: true, supportsStructuredOutputs: true, ...options }),
};
const model = providers[provider]()(process.env.MODEL);
const greedy = { model, temperature: 0, maxRetries: 0 };
const question = "What is the capital of France?";
const capital = z.object({ city: z.enum(["Berlin", "Paris", "Rome"]) });

async function chat() {
  const plain = await generateText({ ...greedy, prompt: question });
  const stream = streamText({ ...greedy, prompt: question });
  const deltas = [];
  for await (const delta of stream.textStream) deltas.push(delta);
  return {
    plain: plain.text,
    finishReason: plain.finishReason,
    deltas,
    tokens: [plain.usage.outputTokens, (await stream.usage).outputTokens],
  };
}

async function object() {
  const output = Output.object({ schema: capital });
  const limited = { ...greedy, prompt: question, output, maxOutputTokens: 64 };
  const plain = await generateText(limited);
  const stream = streamText(limited);
  let last;
  for await (const partial of stream.partialOutputStream) last = partial;
  return [plain.output, last];
}

async function force() {
  const name_capital = tool({ description: "Name a capital.", inputSchema: capital });
  const plain = await generateText({
    ...greedy,
    prompt: question,
    tools: { name_capital },
    toolChoice: "required",
    maxOutputTokens: 64,
  });
  return { toolName: plain.toolCalls[0].toolName, input: plain.toolCalls[0].input };
}

async function agent() {
  const tools = {
    get_weather: tool({
      description: "Get the weather in a city.",
      inputSchema: z.object({ city: z.string(), note: z.string() }),
      execute: async ({ city, note }) => `sunny in ${city}, ${note}`,
    }),
    now: tool({ description: "Get the time.", inputSchema: z.object({}), execute: async () => "noon" }),
  };
  const loop = { model, maxRetries: 0, prompt: "The weather?", tools, stopWhen: stepCountIs(3) };
  const plain = await generateText(loop);
  const stream = streamText(loop);
  for await (const _ of stream.fullStream);
  const show = (steps) =>
    steps.map(({ text, reasoningText, toolResults }) => ({ text, reasoningText, results: toolResults.map(({ output }) => output) }));
  return { plain: show(plain.steps), streamed: show(await stream.steps) };
}

async function errors() {
  const failures = [
    generateText({ ...greedy, model: providers[provider]()("gpt-9"), prompt: question }),
    generateText({ ...greedy, prompt: "word ".repeat(2000) }),
  ];
  const seen = await Promise.allSettled(failures);
  return seen.map(({ reason }) => [reason.name, reason.statusCode, reason.message]);
}

const scripts = { chat, object, force, agent, errors };
const seen = {};
for (const name of asked) seen[name] = await scripts[name]();
console.log(JSON.stringify(seen));
