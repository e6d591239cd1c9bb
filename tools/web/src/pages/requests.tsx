// Requests: those that are open, and the last that ended. A list of a thousand stays smooth.

import { useMemo, useState } from "preact/hooks";
import { RequestId } from "../components/request-id";
import { VirtualList, type VirtualColumn } from "../components/virtual-list";
import { count, seconds, words } from "../format";
import { useLive } from "../live";
import type { RequestRow } from "../types";

const STATES = ["all", "waiting", "running", "finished"] as const;
type State = (typeof STATES)[number];

const COLUMNS: VirtualColumn<RequestRow>[] = [
  { title: "Request", width: "minmax(13rem, 2fr)", cell: (row) => <RequestId id={row.id} /> },
  { title: "State", width: "5rem", cell: (row) => <span class={`state ${row.state}`}>{row.state}</span> },
  { title: "Why", width: "minmax(7rem, 1fr)", cell: (row) => words(row.why) },
  { title: "Tenant", width: "minmax(5rem, 1fr)", cell: (row) => row.tenant },
  { title: "Class", width: "5rem", cell: (row) => row.service_class },
  { title: "Prompt", width: "4.4rem", number: true, cell: (row) => count(row.prompt_tokens) },
  { title: "Cached", width: "4.4rem", number: true, cell: (row) => count(row.cached_tokens) },
  { title: "Output", width: "4.4rem", number: true, cell: (row) => count(row.output_tokens) },
  { title: "TTFT", width: "4.4rem", number: true, cell: (row) => seconds(row.ttft_seconds) },
  { title: "Time", width: "4.4rem", number: true, cell: (row) => seconds(row.age_seconds) },
];

export function Requests() {
  const { snapshot } = useLive();
  const [state, setState] = useState<State>("all");
  const [text, setText] = useState("");
  const part = snapshot?.requests;
  const rows = useMemo(() => (part ? part.rows.map((row) => named(part.columns, row)) : []), [part]);
  const shown = useMemo(() => rows.filter((row) => fits(row, state, text)), [rows, state, text]);
  if (!part) return <p class="hint">Waiting for the first figures.</p>;
  return (
    <>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label>
          State
          <select value={state} onChange={(event) => setState(event.currentTarget.value as State)}>
            {STATES.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <label>
          Search
          <input
            type="search"
            placeholder="id, tenant, class, reason"
            value={text}
            onInput={(event) => setText(event.currentTarget.value)}
          />
        </label>
        <output>
          {count(shown.length)} of {count(rows.length + part.more)} requests
        </output>
      </form>
      <VirtualList label="Requests, newest first" columns={COLUMNS} rows={shown} rowKey={(row) => row.id} />
    </>
  );
}

function named(columns: string[], row: unknown[]): RequestRow {
  return Object.fromEntries(columns.map((column, at) => [column, row[at]])) as unknown as RequestRow;
}

function fits(row: RequestRow, state: State, text: string): boolean {
  if (state !== "all" && row.state !== state) return false;
  const wanted = text.trim().toLowerCase();
  return !wanted || [row.id, row.tenant, row.service_class, words(row.why)].some((part) => part.toLowerCase().includes(wanted));
}
