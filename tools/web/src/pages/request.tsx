// One request: when it waited, computed its prompt, and generated each token; with its cost, and as files.

import { useState } from "preact/hooks";
import { Figures } from "../components/figures";
import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { download, save } from "../download";
import { count, money, seconds, words } from "../format";
import { usePolled } from "../polled";
import type { PageProps } from "../pages";
import { href } from "../route";

interface Timeline {
  id: string;
  state: string;
  tenant: string;
  prompt_tokens: number;
  image_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  preemptions: number;
  cost: Record<string, number | string | null>;
  stages: { stage: string; start: number; end: number }[];
  chunks: { start: number; end: number | null; position: number; tokens: number; why: string }[];
  token_seconds: number[];
  token_seconds_dropped: number;
  events: { seconds: number; event: string; [fact: string]: unknown }[];
  events_dropped: number;
  finish: { seconds: number; reason: string; message: string } | null;
}

type Answer = Timeline | { id: string; sequences: Timeline[] };

const EVERY_MS = 1000;

export function Request({ argument }: PageProps) {
  const [error, setError] = useState("");
  const [ended, setEnded] = useState(false);
  const path = argument ? `/v1/requests/${encodeURIComponent(argument)}/timeline` : null;
  const polled = usePolled<Answer>(path, ended ? 1 << 30 : EVERY_MS);
  const answer = polled.value;
  const sequences = !answer ? [] : "sequences" in answer ? answer.sequences : [answer];
  if (sequences.length && !ended && sequences.every((each) => each.state === "finished")) setEnded(true);
  const attempt = (work: () => Promise<void> | void) => {
    setError("");
    Promise.resolve(work()).catch((reason: Error) => setError(reason.message));
  };
  return (
    <>
      <Find given={argument} />
      {(error || polled.error) && (
        <p class="notice" role="alert">
          {error || polled.error}
        </p>
      )}
      {answer && (
        <p class="filters">
          <button
            type="button"
            onClick={() => attempt(() => download(`${path}?format=perfetto`, `${argument}.perfetto.json`))}
          >
            Export for Perfetto
          </button>
          <button
            type="button"
            class="quiet"
            onClick={() =>
              attempt(() => save(new Blob([JSON.stringify(answer, null, 2)], { type: "application/json" }), `${argument}.json`))
            }
          >
            Export as JSON
          </button>
        </p>
      )}
      {sequences.map((each) => (
        <One key={each.id} life={each} />
      ))}
    </>
  );
}

function Find({ given }: { given: string }) {
  const [id, setId] = useState(given);
  return (
    <form
      class="filters"
      onSubmit={(event) => {
        event.preventDefault();
        location.hash = href("request", id.trim()).slice(1);
      }}
    >
      <label>
        Request or X-Request-Id
        <input type="search" size={36} value={id} onInput={(event) => setId(event.currentTarget.value)} />
      </label>
      <button type="submit">Show</button>
    </form>
  );
}

function promptHint(life: Timeline): string {
  const images = life.image_tokens ? `, ${count(life.image_tokens)} of images` : "";
  return `${count(life.cached_tokens)} cached${images}`;
}

function One({ life }: { life: Timeline }) {
  const { cost } = life;
  const tokens = life.token_seconds;
  const first = tokens[0];
  const last = tokens.at(-1);
  const currency = typeof cost.currency === "string" ? cost.currency : "";
  return (
    <div class="panels">
      <Panel title={life.id} wide>
        <Figures
          figures={[
            { name: "State", value: life.finish?.reason ?? life.state },
            { name: "Prompt", value: count(life.prompt_tokens), hint: promptHint(life) },
            { name: "Output", value: count(life.output_tokens) },
            { name: "Time to first token", value: seconds(first) },
            {
              name: "Per further token",
              value: seconds(first !== undefined && last !== undefined && tokens.length > 1 ? (last - first) / (tokens.length - 1) : null),
            },
            { name: "Preemptions", value: count(life.preemptions) },
            { name: "Device time", value: seconds(cost.device_seconds as number | null) },
            { name: "Operations", value: count(cost.estimated_flops as number | null), hint: "without attention" },
            ...(typeof cost.total === "number" ? [{ name: "Cost", value: money(cost.total, currency) }] : []),
          ]}
        />
        <Picture life={life} />
        {life.finish?.message && <p class="notice">{life.finish.message}</p>}
      </Panel>
      <Panel title="Prompt chunks">
        <Table
          caption="Prompt chunks"
          rows={life.chunks}
          rowKey={(chunk) => `${chunk.position} ${chunk.start}`}
          empty="No part of the prompt was computed."
          columns={[
            { title: "Positions", cell: (chunk) => `${chunk.position} to ${chunk.position + chunk.tokens - 1}` },
            { title: "At", number: true, cell: (chunk) => seconds(chunk.start) },
            { title: "Took", number: true, cell: (chunk) => seconds(chunk.end === null ? null : chunk.end - chunk.start) },
            { title: "Why so many", cell: (chunk) => <span class="wrap">{chunk.why}</span> },
          ]}
        />
      </Panel>
      <Panel title="Events" note={life.events_dropped ? `${count(life.events_dropped)} further events.` : undefined}>
        <Table
          caption="Events"
          rows={life.events.map((event, at) => ({ ...event, at }))}
          rowKey={(event) => String(event.at)}
          empty="None."
          columns={[
            { title: "Event", cell: (event) => words(event.event) },
            { title: "At", number: true, cell: (event) => `${(event.seconds * 1e3).toFixed(1)} ms` },
            { title: "Details", cell: (event) => <span class="wrap">{details(event)}</span> },
          ]}
        />
      </Panel>
    </div>
  );
}

function details(event: Record<string, unknown>): string {
  return Object.entries(event)
    .filter(([name]) => !["seconds", "event", "at", "reason"].includes(name))
    .map(([name, value]) => `${words(name)} ${String(value)}`)
    .join(", ");
}

const WIDTH = 1000;

function Picture({ life }: { life: Timeline }) {
  const begin = Math.min(0, ...life.events.map((event) => event.seconds));
  const end = Math.max(1e-9, ...life.stages.map((stage) => stage.end), ...life.token_seconds.slice(-1));
  const x = (at: number) => (WIDTH * (at - begin)) / (end - begin);
  const told = life.stages.map((stage) => `${stage.stage} ${seconds(stage.end - stage.start)}`).join(", ");
  return (
    <>
      <svg class="timeline" viewBox={`0 0 ${WIDTH} 70`} preserveAspectRatio="none" role="img" aria-label={`Timeline: ${told}`}>
        {life.stages.map((stage, at) => (
          <rect key={at} class={stage.stage} x={x(stage.start)} y={4} width={Math.max(1, x(stage.end) - x(stage.start))} height={26} />
        ))}
        {life.chunks.map((chunk, at) => (
          <rect
            key={at}
            class="chunk"
            x={x(chunk.start)}
            y={10}
            width={Math.max(1, x(chunk.end ?? chunk.start) - x(chunk.start) - 1)}
            height={14}
          />
        ))}
        {life.token_seconds.map((at, number) => (
          <rect key={number} class="token" x={x(at) - 1} y={36} width={1.5} height={14} />
        ))}
        {life.events
          .filter((event) => event.event !== "waits")
          .map((event, at) => (
            <rect key={at} class={`event ${event.event}`} x={x(event.seconds) - 1} y={54} width={3} height={12} />
          ))}
      </svg>
      <ul class="legend">
        {[
          ["queue", "queue"],
          ["prefill", "prefill, with its chunks"],
          ["decode", "decode"],
          ["token", "tokens"],
          ["event", "events"],
        ].map(([kind, name]) => (
          <li key={kind}>
            <svg class="timeline key" width="14" height="14" aria-hidden="true">
              <rect class={kind} x="1" y="1" width="12" height="12" />
            </svg>
            {name}
          </li>
        ))}
        <li>{seconds(end - begin)} in all</li>
      </ul>
    </>
  );
}
