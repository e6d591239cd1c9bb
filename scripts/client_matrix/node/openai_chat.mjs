// OpenAI's client for node: chat completions and the Responses API.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ANSWER, BUILTIN, checkAnimal, DEGREES, DIALECT, QUESTION, run, SCRIPTED, STORY, WEATHER_SCHEMA,
} from "./cases.mjs";

const builtin = new OpenAI({ baseURL: BUILTIN.url, apiKey: "none", maxRetries: 0 });
const scripted = new OpenAI({ baseURL: SCRIPTED.url, apiKey: "none", maxRetries: 0 });
const Animal = z.object({ kind: z.enum(["fox", "hen"]), age: z.number().int() });
const messages = [{ role: "user", content: STORY }];
const tool = { type: "function", function: { name: "get_weather", parameters: WEATHER_SCHEMA } };
const model = BUILTIN.model;

const completions = {
  async chat() {
    const answer = await builtin.chat.completions.create({ model, messages, max_completion_tokens: 20 });
    assert.ok(answer.choices[0].message.content);
  },
  async stream() {
    const stream = builtin.chat.completions.stream({
      model, messages, max_tokens: 20, stream_options: { include_usage: true },
    });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    const final = await stream.finalChatCompletion();
    assert.equal(text, final.choices[0].message.content);
    assert.ok((await stream.totalUsage()).completion_tokens > 0);
  },
  async structured() {
    const response_format = zodResponseFormat(Animal, "animal");
    const answer = await builtin.chat.completions.parse({ model, messages, response_format });
    checkAnimal(answer.choices[0].message.parsed);
  },
  async tool() {
    const history = [{ role: "user", content: QUESTION }];
    const asked = { model: SCRIPTED.model, messages: history, tools: [tool] };
    const first = await scripted.chat.completions.create(asked);
    const [call] = first.choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    history.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: DEGREES });
    const second = await scripted.chat.completions.create(asked);
    assert.equal(second.choices[0].message.content, ANSWER);
    const runner = scripted.chat.completions.runTools({
      model: SCRIPTED.model,
      stream: true,
      messages: [{ role: "user", content: QUESTION }],
      tools: [{
        type: "function",
        function: {
          name: "get_weather", parameters: WEATHER_SCHEMA, parse: JSON.parse, function: async () => DEGREES,
        },
      }],
    });
    assert.equal(await runner.finalContent(), ANSWER);
  },
};

const responseTool = { type: "function", name: "get_weather", parameters: WEATHER_SCHEMA, strict: true };
const responses = {
  async chat() {
    const first = await builtin.responses.create({ model, input: STORY, max_output_tokens: 20 });
    assert.ok(first.output_text);
    const second = await builtin.responses.create({
      model, input: "Go on.", previous_response_id: first.id, max_output_tokens: 20,
    });
    assert.ok(second.output_text);
  },
  async stream() {
    const stream = builtin.responses.stream({ model, input: STORY, max_output_tokens: 20 });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, (await stream.finalResponse()).output_text);
  },
  async structured() {
    const answer = await builtin.responses.parse({
      model, input: STORY, text: { format: zodTextFormat(Animal, "animal") },
    });
    checkAnimal(answer.output_parsed);
  },
  async tool() {
    const input = [{ role: "user", content: QUESTION }];
    const asked = { model: SCRIPTED.model, input, tools: [responseTool] };
    const first = await scripted.responses.create(asked);
    const call = first.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: DEGREES });
    assert.equal((await scripted.responses.create(asked)).output_text, ANSWER);
  },
};

await run("openai", DIALECT === "responses" ? responses : completions);
