// OpenAI's Agents SDK for node; the fifth argument picks the API.
import assert from "node:assert/strict";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run as start, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { ANSWER, BUILTIN, checkAnimal, DEGREES, DIALECT, QUESTION, run, SCRIPTED, STORY } from "./cases.mjs";

setTracingDisabled(true);
const Animal = z.object({ kind: z.enum(["fox", "hen"]), age: z.number().int() });
const weather = tool({
  name: "get_weather",
  description: "The weather now.",
  parameters: z.object({ city: z.string() }),
  execute: async () => DEGREES,
});

function agent(place, more = {}) {
  const client = new OpenAI({ baseURL: place.url, apiKey: "none", maxRetries: 0 });
  const Form = DIALECT === "responses" ? OpenAIResponsesModel : OpenAIChatCompletionsModel;
  const model = new Form(client, place.model);
  return new Agent({ name: "a", instructions: "Be brief.", model, modelSettings: { maxTokens: 200, temperature: 0 }, ...more });
}

await run("@openai/agents", {
  async chat() {
    const first = await start(agent(BUILTIN), STORY);
    assert.ok(first.finalOutput);
    const again = [...first.history, { role: "user", content: "Go on." }];
    assert.ok((await start(agent(BUILTIN), again)).finalOutput);
  },
  async stream() {
    const result = await start(agent(BUILTIN), STORY, { stream: true });
    let text = "";
    for await (const piece of result.toTextStream()) text += piece;
    await result.completed;
    assert.equal(text, result.finalOutput);
  },
  async structured() {
    checkAnimal((await start(agent(BUILTIN, { outputType: Animal }), STORY)).finalOutput);
  },
  async tool() {
    assert.equal((await start(agent(SCRIPTED, { tools: [weather] }), QUESTION)).finalOutput, ANSWER);
    const streamed = await start(agent(SCRIPTED, { tools: [weather] }), QUESTION, { stream: true });
    for await (const event of streamed) void event;
    await streamed.completed;
    assert.equal(streamed.finalOutput, ANSWER);
  },
});
