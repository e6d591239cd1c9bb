// A form for a small simulation: settings of the engine, and requests as lines of text.

import { useState } from "preact/hooks";
import type { Scenario, ScenarioRequest } from "./types";

const START: Scenario = {
  requests: [64, 300, 48, 200, 96, 400].map((prompt_tokens, at) => ({
    prompt_tokens,
    output_tokens: [24, 12, 40, 16, 30, 10][at]!,
    arrival: at * 0.02,
    shared_tokens: 0,
    quotes: false,
  })),
  scheduling_policy: "fair",
  max_num_seqs: 4,
  max_num_batched_tokens: 256,
  num_blocks: 96,
  enable_chunked_prefill: true,
  enable_prefix_caching: true,
  num_speculative_tokens: 0,
};

const NUMBERS = [
  ["max_num_seqs", "Slots (max_num_seqs)", 1, 32],
  ["max_num_batched_tokens", "Tokens of a step (max_num_batched_tokens)", 1, 16384],
  ["num_blocks", "Blocks of 16 tokens", 1, 1024],
  ["num_speculative_tokens", "Drafted tokens", 0, 16],
] as const;

const SWITCHES = [
  ["enable_chunked_prefill", "Chunked prefill"],
  ["enable_prefix_caching", "Prefix caching"],
] as const;

/** `prompt output arrival shared quotes` in a line; all but the first two may be left out. */
export function written(requests: ScenarioRequest[]): string {
  return requests
    .map((each) => {
      const fields = [each.prompt_tokens, each.output_tokens, each.arrival, each.shared_tokens].map(String);
      return [...fields, ...(each.quotes ? ["quotes"] : [])].join(" ");
    })
    .join("\n");
}

export function read(text: string): ScenarioRequest[] {
  const lines = text.split("\n").filter((line) => line.trim());
  return lines.map((line, at) => {
    const words = line.trim().split(/\s+/);
    const quotes = words.at(-1) === "quotes";
    const numbers = (quotes ? words.slice(0, -1) : words).map(Number);
    const [prompt_tokens, output_tokens, arrival = 0, shared_tokens = 0] = numbers;
    if (prompt_tokens === undefined || output_tokens === undefined || numbers.length > 4 || numbers.some(Number.isNaN)) {
      throw new Error(`Line ${at + 1}: expected prompt tokens, output tokens, and optionally arrival and shared tokens.`);
    }
    return { prompt_tokens, output_tokens, arrival, shared_tokens, quotes };
  });
}

interface Props {
  run: (scenario: Scenario) => void;
  busy: boolean;
}

export function ScenarioForm({ run, busy }: Props) {
  const [scenario, change] = useState(START);
  const [requests, setRequests] = useState(written(START.requests));
  const [error, setError] = useState("");
  return (
    <form
      class="scenario"
      onSubmit={(event) => {
        event.preventDefault();
        try {
          const next = { ...scenario, requests: read(requests) };
          setError("");
          run(next);
        } catch (reason) {
          setError(reason instanceof Error ? reason.message : String(reason));
        }
      }}
    >
      <label>
        Scheduling policy
        <select
          value={scenario.scheduling_policy}
          onChange={(event) =>
            change({ ...scenario, scheduling_policy: event.currentTarget.value as Scenario["scheduling_policy"] })
          }
        >
          {["fair", "fcfs", "priority", "static"].map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </label>
      {NUMBERS.map(([name, title, least, most]) => (
        <label key={name}>
          {title}
          <input
            type="number"
            min={least}
            max={most}
            required
            value={scenario[name]}
            onInput={(event) => change({ ...scenario, [name]: event.currentTarget.valueAsNumber })}
          />
        </label>
      ))}
      {SWITCHES.map(([name, title]) => (
        <label key={name} class="choice">
          <input
            type="checkbox"
            checked={scenario[name]}
            onChange={(event) => change({ ...scenario, [name]: event.currentTarget.checked })}
          />
          {title}
        </label>
      ))}
      <label class="lines">
        Requests, one in a line: prompt tokens, output tokens, arrival in seconds, shared prompt tokens, “quotes”
        <textarea rows={8} value={requests} onInput={(event) => setRequests(event.currentTarget.value)} />
      </label>
      <button type="submit" disabled={busy}>
        {busy ? "Simulating" : "Simulate"}
      </button>
      {error && (
        <p class="notice" role="alert">
          {error}
        </p>
      )}
    </form>
  );
}
