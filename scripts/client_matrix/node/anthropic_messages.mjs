// Anthropic's client for node.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import {
  ANIMAL_SCHEMA, ANSWER, BUILTIN, checkAnimal, DEGREES, QUESTION, run, SCRIPTED, STORY, WEATHER_SCHEMA,
} from "./cases.mjs";

const builtin = new Anthropic({ baseURL: BUILTIN.root, apiKey: "none", maxRetries: 0 });
const scripted = new Anthropic({ baseURL: SCRIPTED.root, apiKey: "none", maxRetries: 0 });
const asked = { model: BUILTIN.model, max_tokens: 60, messages: [{ role: "user", content: STORY }] };

await run("@anthropic-ai/sdk", {
  async chat() {
    const message = await builtin.messages.create({ ...asked, system: "You tell stories." });
    assert.ok(message.content[0].text);
  },
  async stream() {
    let text = "";
    const stream = builtin.messages.stream(asked).on("text", (piece) => (text += piece));
    assert.equal(await stream.finalText(), text);
  },
  async structured() {
    const format = { type: "json_schema", schema: ANIMAL_SCHEMA };
    const message = await builtin.messages.create({ ...asked, output_config: { format } });
    checkAnimal(JSON.parse(message.content[0].text));
  },
  async tool() {
    const messages = [{ role: "user", content: QUESTION }];
    const tools = [{ name: "get_weather", input_schema: WEATHER_SCHEMA }];
    const calling = { model: SCRIPTED.model, max_tokens: 300, tools, messages };
    const first = await scripted.messages.stream(calling).finalMessage();
    const call = first.content.find((block) => block.type === "tool_use");
    assert.deepEqual(call.input, { city: "Paris" });
    const result = { type: "tool_result", tool_use_id: call.id, content: DEGREES };
    messages.push({ role: "assistant", content: first.content }, { role: "user", content: [result] });
    const second = await scripted.messages.create(calling);
    assert.equal(second.content[0].text, ANSWER);
  },
});
