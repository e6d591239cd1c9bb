// LangChain for node; the fifth argument picks the API.
import assert from "node:assert/strict";
import { ChatAnthropic } from "@langchain/anthropic";
import { tool as asTool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { ANSWER, BUILTIN, checkAnimal, DEGREES, DIALECT, QUESTION, run, SCRIPTED, STORY } from "./cases.mjs";

const Animal = z.object({ kind: z.enum(["fox", "hen"]), age: z.number().int() });
const weather = asTool(async () => DEGREES, {
  name: "get_weather", description: "The weather now.", schema: z.object({ city: z.string() }),
});

function model({ root, url, model }) {
  const more = { model, apiKey: "none", maxRetries: 0 };
  if (DIALECT === "anthropic") return new ChatAnthropic({ ...more, anthropicApiUrl: root, maxTokens: 200 });
  return new ChatOpenAI({ ...more, useResponsesApi: DIALECT === "responses", configuration: { baseURL: url } });
}

await run(DIALECT === "anthropic" ? "@langchain/anthropic" : "@langchain/openai", {
  async chat() {
    assert.ok((await model(BUILTIN).invoke(STORY)).text);
  },
  async stream() {
    let text = "";
    for await (const chunk of await model(BUILTIN).stream(STORY)) text += chunk.text;
    assert.ok(text);
  },
  async structured() {
    // Anthropic's own transformation of a JSON schema leaves enumerations out, so calls of a tool are tested there.
    const method = DIALECT === "anthropic" ? "functionCalling" : "jsonSchema";
    checkAnimal(await model(BUILTIN).withStructuredOutput(Animal, { name: "animal", method }).invoke(STORY));
  },
  async tool() {
    const agent = createReactAgent({ llm: model(SCRIPTED), tools: [weather] });
    assert.equal((await agent.invoke({ messages: [["human", QUESTION]] })).messages.at(-1).text, ANSWER);
  },
});
