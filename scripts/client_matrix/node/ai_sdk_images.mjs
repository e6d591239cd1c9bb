// An image by the Vercel AI SDK: the arguments are the base URL, the model, the provider, and a PNG file in base64.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const [, , baseURL, name, provider, file] = process.argv;
const given = { baseURL, apiKey: "none" };
const model = {
  openai: () => createOpenAI(given)(name),
  "openai-chat": () => createOpenAI(given).chat(name),
  compatible: () => createOpenAICompatible({ name: "headrace", ...given })(name),
  anthropic: () => createAnthropic(given)(name),
}[provider]();
const more = { model, maxRetries: 0, maxOutputTokens: 16 };
const text = { type: "text", text: "w1" };
const image = { type: "file", mediaType: "image/png", data: Buffer.from(file, "base64") };
const plain = await generateText({ ...more, messages: [{ role: "user", content: [text] }] });
const shown = await generateText({ ...more, messages: [{ role: "user", content: [text, image] }] });
console.log(JSON.stringify({ inputTokens: shown.usage.inputTokens, plainInputTokens: plain.usage.inputTokens }));
