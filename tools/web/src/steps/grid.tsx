// Rows over steps: a lane for each request, a column for each step, the newest steps up to the chosen one.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Film, Row, Step } from "./types";

const CELL = 16;
const LANE = 22;
const MOST_LANES = 64;
const LABEL = 84;

interface Props {
  film: Film;
  at: number;
  chosen: string | null;
  choose: (id: string | null) => void;
}

export function Grid({ film, at, chosen, choose }: Props) {
  const [frame, columns] = useColumns();
  const steps = useMemo(() => window_(film.steps, at, columns), [film, at, columns]);
  const lanes = useMemo(() => lanesOf(film, steps), [film, steps]);
  const place = new Map(lanes.map((id, lane) => [id, lane]));
  const height = Math.max(1, lanes.length) * LANE;
  return (
    <div class="grid" ref={frame}>
      <div class="lanes" role="group" aria-label="Requests" style={{ width: `${LABEL}px` }}>
        {lanes.map((id) => (
          <button
            key={id}
            type="button"
            class="link"
            title={id}
            aria-pressed={id === chosen}
            onClick={() => choose(id === chosen ? null : id)}
          >
            {short(id)}
          </button>
        ))}
      </div>
      <svg
        width={columns * CELL}
        height={height}
        role="img"
        aria-label={`Rows of steps ${steps[0]?.step ?? 0} to ${steps.at(-1)?.step ?? 0}; the table below has those of the last one`}
      >
        {lanes.map((id, lane) => (
          <rect
            key={id}
            class={id === chosen ? "lane chosen" : "lane"}
            x={0}
            y={lane * LANE}
            width={columns * CELL}
            height={LANE - 2}
          />
        ))}
        {steps.map((step, column) => (
          <Column key={step.step} step={step} x={column * CELL} place={place} last={column === steps.length - 1} />
        ))}
      </svg>
    </div>
  );
}

function Column({ step, x, place, last }: { step: Step; x: number; place: Map<string, number>; last: boolean }) {
  const y = (id: string) => place.get(id)! * LANE;
  return (
    <g>
      {last && <rect class="now" x={x} y={0} width={CELL} height={place.size * LANE} />}
      {step.queue.map((each) => place.has(each.id) && <Cell key={each.id} kind="waits" x={x} y={y(each.id)} />)}
      {step.rows.map((row) => place.has(row.id) && <RowCell key={row.id} row={row} x={x} y={y(row.id)} />)}
      {step.events.map(
        (event) =>
          place.has(event.id) &&
          MARKS[event.event] && (
            <text key={event.id + event.event} class={`mark-${event.event}`} x={x + CELL / 2} y={y(event.id) + 15}>
              {MARKS[event.event]}
            </text>
          ),
      )}
    </g>
  );
}

const MARKS: Record<string, string> = { preempted: "✕", resumed: "↻", restored: "↑", finished: "■" };

function RowCell({ row, x, y }: { row: Row; x: number; y: number }) {
  if (!row.drafted) return <Cell kind={row.kind} x={x} y={y} />;
  const share = (row.accepted ?? 0) / row.drafted;
  const height = LANE - 4;
  return (
    <g>
      <Cell kind="decode" x={x} y={y} />
      <rect class="rejected" x={x + 1} y={y + 1} width={CELL - 2} height={height / 2} />
      <rect class="accepted" x={x + 1} y={y + 1} width={(CELL - 2) * share} height={height / 2} />
    </g>
  );
}

function Cell({ kind, x, y }: { kind: string; x: number; y: number }) {
  return <rect class={kind} x={x + 1} y={y + 1} width={CELL - 2} height={LANE - 4} rx={2} />;
}

export function Legend() {
  const kinds = [
    ["prefill", "prefill"],
    ["decode", "decode"],
    ["accepted", "drafts accepted"],
    ["rejected", "drafts rejected"],
    ["waits", "waiting"],
  ] as const;
  return (
    <ul class="legend">
      {kinds.map(([kind, name]) => (
        <li key={kind}>
          <svg width="14" height="14" aria-hidden="true">
            <rect class={kind} x="1" y="1" width="12" height="12" rx="2" />
          </svg>
          {name}
        </li>
      ))}
      <li>✕ preempted</li>
      <li>↻ resumed</li>
      <li>↑ restored from a lower tier</li>
      <li>■ finished</li>
    </ul>
  );
}

/** The end of a long id says more than its begin. */
export function short(id: string): string {
  return id.length > 10 ? `…${id.slice(-9)}` : id;
}

function window_(steps: Step[], at: number, columns: number): Step[] {
  return steps.slice(Math.max(0, at + 1 - columns), at + 1);
}

/** The requests in these steps, in order of arrival; of a simulation all of them, so that lanes do not move. */
function lanesOf(film: Film, steps: Step[]): string[] {
  const order = film.requests.map((each) => each.id);
  if (film.source === "simulation") return order;
  const seen = new Set<string>();
  for (const step of steps.toReversed()) {
    for (const row of step.rows) if (seen.size < MOST_LANES) seen.add(row.id);
    for (const each of step.queue) if (seen.size < MOST_LANES) seen.add(each.id);
  }
  const known = order.filter((id) => seen.delete(id));
  return [...seen, ...known];
}

function useColumns() {
  const frame = useRef<HTMLDivElement>(null);
  const [columns, setColumns] = useState(40);
  useEffect(() => {
    const measure = () => setColumns(Math.max(8, Math.floor(((frame.current?.clientWidth ?? 0) - LABEL - 4) / CELL)));
    const observer = new ResizeObserver(measure);
    if (frame.current) observer.observe(frame.current);
    measure();
    return () => observer.disconnect();
  }, []);
  return [frame, columns] as const;
}
