// Runs a client's cases and prints one JSON line per case, as python/cases.py does.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [, , root, model, scriptedRoot, scriptedModel, dialect] = process.argv;
export const BUILTIN = { root, model, url: `${root}/v1` };
export const SCRIPTED = { root: scriptedRoot, model: scriptedModel, url: `${scriptedRoot}/v1` };
export const DIALECT = dialect;
export const QUESTION = "How warm is it in Paris?";
export const STORY = "Tell me a story about a fox.";
export const ANSWER = "It is 21 degrees in Paris.";
export const DEGREES = '{"degrees": 21}';
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const ANIMAL_SCHEMA = {
  type: "object",
  properties: {
    kind: { type: "string", enum: ["fox", "hen"] },
    age: { type: "integer", minimum: 0, maximum: 20 },
  },
  required: ["kind", "age"],
  additionalProperties: false,
};

export function checkAnimal(value) {
  assert.deepEqual(Object.keys(value).sort(), ["age", "kind"]);
  assert.ok(["fox", "hen"].includes(value.kind));
  assert.ok(Number.isInteger(value.age));
}

export async function run(name, cases) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  for (const [label, test] of Object.entries(cases)) {
    let reason = "";
    try {
      await test();
    } catch (error) {
      console.error(error);
      reason = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
    }
    console.log(JSON.stringify({ version, case: label, reason }));
  }
}
