// One film at one place: rows over steps, the rows of the step, the queue and the blocks.

import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { count, many, seconds, words } from "../format";
import { Blocks } from "./blocks";
import { Grid, Legend, short } from "./grid";
import type { Film, Row, Step, StepEvent, Waiting } from "./types";

interface Props {
  film: Film;
  at: number;
  /** The request whose blocks are marked. */
  chosen: string | null;
  choose: (id: string | null) => void;
  title: string;
  /** Whether another film is beside it, so that the titles of the parts must name this one. */
  beside?: boolean;
}

export function StepView({ film, at, chosen, choose, title, beside }: Props) {
  const step = film.steps[at];
  if (!step) return <p class="hint">No step has run yet.</p>;
  const memory = step.memory ?? (at === film.steps.length - 1 ? film.memory : null);
  const fresh = new Set(step.rows.flatMap((row) => row.new_blocks ?? []));
  const of = beside ? `: ${title}` : "";
  const more = step.waiting > step.queue.length;
  return (
    <div class="panels film">
      <Panel title={title} wide>
        <Grid film={film} at={at} chosen={chosen} choose={choose} />
        <Legend />
        <p class="hint">{sentence(step)}</p>
      </Panel>
      <Panel
        title={`KV blocks${of}`}
        note={memory ? undefined : "The picture of an earlier step of a live server is not kept."}
      >
        {chosen === null && memory && <p class="hint">Choose a request above to see its block table.</p>}
        {memory ? (
          <Blocks memory={memory} chosen={chosen} fresh={fresh} />
        ) : (
          <p>
            {count(step.blocks_held)} of {count(step.blocks_total)} blocks are used.
          </p>
        )}
      </Panel>
      <Panel title={`Queue${of}`} note={more ? `${count(step.waiting)} wait in all.` : undefined}>
        <Queue step={step} />
      </Panel>
      <Panel title={`Rows of the step${of}`}>
        <Rows step={step} />
      </Panel>
      <Panel title={`Events${of}`}>
        <Events events={step.events} />
      </Panel>
    </div>
  );
}

function sentence(step: Step): string {
  const tokens = step.rows.reduce((sum, row) => sum + row.length, 0);
  const work = `${many(tokens, "token")} in ${many(step.rows.length, "row")}`;
  return (
    `Step ${count(step.step)} took ${seconds(step.ended - step.began)} and computed ${work}. ` +
    `After it, ${many(step.running, "request")} ran and ${count(step.waiting)} waited.`
  );
}

function Rows({ step }: { step: Step }) {
  return (
    <Table<Row>
      caption="Rows of the step"
      rows={step.rows}
      rowKey={(row) => row.id}
      empty="No row."
      columns={[
        { title: "Request", cell: (row) => <span title={row.id}>{short(row.id)}</span> },
        { title: "Kind", cell: (row) => row.kind },
        {
          title: "Positions",
          cell: (row) => (row.length > 1 ? `${row.start} to ${row.start + row.length - 1}` : `${row.start}`),
        },
        { title: "Drafts", cell: (row) => (row.drafted ? `${row.accepted} of ${row.drafted} accepted` : "–") },
        { title: "New blocks", number: true, cell: (row) => count(row.new_blocks?.length ?? 0) },
      ]}
    />
  );
}

function Queue({ step }: { step: Step }) {
  return (
    <Table<Waiting>
      caption="Waiting requests"
      rows={step.queue}
      rowKey={(each) => each.id}
      empty="No request waits."
      columns={[
        { title: "Request", cell: (each) => <span title={each.id}>{short(each.id)}</span> },
        { title: "Waited", number: true, cell: (each) => seconds(Math.max(0, step.ended - each.since)) },
        { title: "Why", cell: (each) => <span class="wrap">{each.why}</span> },
      ]}
    />
  );
}

function Events({ events }: { events: StepEvent[] }) {
  if (!events.length) return <p class="hint">Nothing happened beside the rows.</p>;
  return (
    <ul class="events">
      {events.map((event, at) => (
        <li key={at}>
          <b title={event.id}>{short(event.id)}</b> {words(event.event)}
          {facts(event)}
        </li>
      ))}
    </ul>
  );
}

function facts(event: StepEvent): string {
  const told = Object.entries(event)
    .filter(([name]) => name !== "id" && name !== "event")
    .map(([name, value]) => `${words(name)} ${String(value)}`);
  return told.length ? `: ${told.join(", ")}` : "";
}
