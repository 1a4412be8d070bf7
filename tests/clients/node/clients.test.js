// OpenAI's and Anthropic's Node clients, and Vercel's AI SDK. `node --test`, with CLIENTS_URL.
import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const URL = process.env.CLIENTS_URL ?? "http://127.0.0.1:8801";
const MODEL = "chat";
const WEATHER = "How is the weather in Rome?";
const HELLO = "Hello! It is good to see you here today.";
const SUNNY = "It is sunny in Rome today";
const THOUGHT = "The user wants a short answer, so I will give one.";
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const USER = [{ role: "user", content: "hi" }];
const ASKED = [{ role: "user", content: WEATHER }];
const Place = z.object({ city: z.enum(["Rome", "Oslo"]), days: z.number().int().min(0).max(9) });

const openai = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const WEATHER_TOOL = { type: "function", function: { name: "get_weather", parameters: CITY } };

test("openai: an answer and a stream say the same", async () => {
  const whole = await openai.chat.completions.create({ model: MODEL, messages: USER, temperature: 0 });
  const { content, reasoning_content: thought } = whole.choices[0].message;
  assert.ok(content.includes(HELLO));
  assert.ok(thought.includes(THOUGHT));
  let [said, thoughts, usage] = ["", "", null];
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const part of await openai.chat.completions.create({ model: MODEL, messages: USER, temperature: 0, ...options })) {
    said += part.choices[0]?.delta.content ?? "";
    thoughts += part.choices[0]?.delta.reasoning_content ?? "";
    usage = part.usage;
  }
  assert.equal(said, content);
  assert.equal(thoughts, thought);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("openai: runTools calls a tool and goes on with its answer", async () => {
  const runner = openai.chat.completions.runTools({
    model: MODEL,
    messages: ASKED,
    temperature: 0,
    tools: [{ type: "function", function: { ...WEATHER_TOOL.function, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` } }],
  });
  assert.ok((await runner.finalContent()).includes(SUNNY));
});

test("openai: a call is demanded, in a stream", async () => {
  const stream = openai.chat.completions.stream({ model: MODEL, messages: USER, temperature: 0, tools: [WEATHER_TOOL], tool_choice: "required" });
  const { message } = (await stream.finalChatCompletion()).choices[0];
  assert.equal(message.tool_calls[0].function.name, "get_weather");
});

test("openai: an answer is parsed by a zod schema", async () => {
  const asked = { model: MODEL, messages: USER, temperature: 0, response_format: zodResponseFormat(Place, "place") };
  const answer = await openai.chat.completions.parse(asked);
  assert.ok(Place.parse(answer.choices[0].message.parsed));
});

test("openai: a refusal says what is allowed, and a stream may be left", async () => {
  await assert.rejects(openai.chat.completions.create({ model: MODEL, messages: USER, temperature: -1 }), (error) => error.status === 400 && /temperature is -1/.test(error.message));
  const stream = await openai.chat.completions.create({ model: MODEL, messages: USER, stream: true, max_tokens: 2000 });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

test("openai: responses, whole and as a stream", async () => {
  const whole = await openai.responses.create({ model: MODEL, input: "hi", temperature: 0 });
  assert.ok(whole.output_text.includes(HELLO));
  const stream = openai.responses.stream({ model: MODEL, input: "hi", temperature: 0 });
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
});

const COLD = { model: MODEL, max_tokens: 200 };

test("anthropic: an answer and a stream say the same", async () => {
  const asked = { ...COLD, messages: USER, temperature: 0 };
  const whole = await anthropic.messages.create(asked);
  const text = whole.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  assert.ok(text.includes(HELLO));
  assert.equal(whole.stop_reason, "end_turn");
  const stream = anthropic.messages.stream(asked);
  assert.equal(await stream.finalText(), text);
  assert.equal((await stream.finalMessage()).usage.output_tokens, whole.usage.output_tokens);
});

test("anthropic: the model chooses a call, and its answer goes back", async () => {
  const tools = [{ name: "get_weather", input_schema: CITY }];
  const first = await anthropic.messages.stream({ ...COLD, messages: ASKED, tools, temperature: 0 }).finalMessage();
  const call = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual(call.input, { city: "Rome" });
  assert.equal(first.stop_reason, "tool_use");
  const reply = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const messages = [...ASKED, { role: "assistant", content: first.content }, { role: "user", content: [reply] }];
  const last = await anthropic.messages.create({ ...COLD, messages, tools, temperature: 0 });
  assert.ok(last.content.some((block) => block.text?.includes(SUNNY)));
});

test("anthropic: tokens are counted, and a refusal says what is allowed", async () => {
  assert.ok((await anthropic.messages.countTokens({ model: MODEL, messages: USER })).input_tokens > 5);
  await assert.rejects(anthropic.messages.create({ ...COLD, messages: USER, temperature: -1 }), (error) => error.status === 400 && /temperature is -1/.test(error.message));
});

const kinds = {
  compatible: createOpenAICompatible({ name: "paceline", baseURL: `${URL}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true })(MODEL),
  chat: createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" }).chat(MODEL),
  responses: createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" }).responses(MODEL),
  anthropic: createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" })(MODEL),
};
const get_weather = tool({
  description: "Says how the weather is in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});

for (const [name, model] of Object.entries(kinds)) {
  const asked = { model, temperature: 0, maxRetries: 0 };

  test(`AI SDK, ${name}: a text and a stream say the same`, async () => {
    const whole = await generateText({ ...asked, prompt: "hi" });
    assert.ok(whole.text.includes(HELLO));
    assert.ok(whole.usage.outputTokens > 10);
    const stream = streamText({ ...asked, prompt: "hi" });
    assert.equal(await stream.text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`AI SDK, ${name}: tools are called and their answers go back, in a stream`, async () => {
    const stream = streamText({ ...asked, prompt: WEATHER, tools: { get_weather }, stopWhen: stepCountIs(3) });
    assert.ok((await stream.text).includes(SUNNY));
    assert.equal((await stream.steps).length, 2);
  });

  test(`AI SDK, ${name}: a call is demanded`, async () => {
    const result = await generateText({ ...asked, prompt: "hi", tools: { get_weather: { ...get_weather, execute: undefined } }, toolChoice: "required" });
    assert.equal(result.toolCalls[0].toolName, "get_weather");
  });

  test(`AI SDK, ${name}: an object has its schema`, async () => {
    assert.ok(Place.parse((await generateObject({ ...asked, prompt: "hi", schema: Place })).object));
  });
}
