// The Vercel AI SDK; the fifth argument picks the provider.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, BUILTIN, checkAnimal, DEGREES, DIALECT, QUESTION, run, SCRIPTED, STORY } from "./cases.mjs";

const providers = {
  openai: ({ url, model }) => createOpenAI({ baseURL: url, apiKey: "none" })(model),
  "openai-chat": ({ url, model }) => createOpenAI({ baseURL: url, apiKey: "none" }).chat(model),
  compatible: ({ url, model }) =>
    createOpenAICompatible({
      name: "headrace", baseURL: url, includeUsage: true, supportsStructuredOutputs: true,
    })(model),
  anthropic: ({ url, model }) => createAnthropic({ baseURL: url, apiKey: "none" })(model),
};
const packages = { openai: "openai", "openai-chat": "openai", compatible: "openai-compatible", anthropic: "anthropic" };
const model = providers[DIALECT];
const Animal = z.object({ kind: z.enum(["fox", "hen"]), age: z.number().int() });
const more = { maxRetries: 0, maxOutputTokens: 200 };
const tools = {
  get_weather: tool({
    description: "The weather now.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      assert.equal(city, "Paris");
      return DEGREES;
    },
  }),
};

await run(`@ai-sdk/${packages[DIALECT]}`, {
  async chat() {
    const answer = await generateText({ model: model(BUILTIN), system: "Be brief.", prompt: STORY, ...more });
    assert.ok(answer.text);
    assert.ok(answer.usage.outputTokens > 0);
    const messages = [{ role: "user", content: STORY }, ...answer.response.messages, { role: "user", content: "Go on." }];
    assert.ok((await generateText({ model: model(BUILTIN), messages, ...more })).text);
  },
  async stream() {
    let failed;
    const onError = ({ error }) => (failed = error);
    const answer = streamText({ model: model(BUILTIN), prompt: STORY, onError, ...more });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    if (failed) throw failed;
    assert.ok(text);
    assert.ok((await answer.usage).outputTokens > 0);
  },
  async structured() {
    const output = Output.object({ schema: Animal });
    const answer = await generateText({ model: model(BUILTIN), prompt: STORY, output, ...more });
    checkAnimal(answer.output);
    const streamed = streamText({ model: model(BUILTIN), prompt: STORY, output, ...more });
    let last;
    for await (const part of streamed.partialOutputStream) last = part;
    checkAnimal(last);
  },
  async tool() {
    const asked = { model: model(SCRIPTED), prompt: QUESTION, tools, stopWhen: stepCountIs(3), maxRetries: 0 };
    assert.equal((await generateText(asked)).text, ANSWER);
    let failed;
    const streamed = streamText({ ...asked, onError: ({ error }) => (failed = error) });
    await streamed.consumeStream();
    if (failed) throw failed;
    assert.equal(await streamed.text, ANSWER);
    const forced = await generateText({
      model: model(BUILTIN), prompt: QUESTION, tools: { look: tool({ inputSchema: z.object({ now: z.boolean() }) }) },
      toolChoice: "required", ...more,
    });
    assert.equal(forced.toolCalls[0].toolName, "look");
  },
});
