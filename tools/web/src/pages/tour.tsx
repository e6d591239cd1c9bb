// The guided tour: short texts with small simulations, side by side where two ways are compared.

import { useEffect, useMemo, useState } from "preact/hooks";
import { getJson, sendJson } from "../api";
import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { count, rate, seconds } from "../format";
import type { PageProps } from "../pages";
import { href } from "../route";
import { Controls } from "../steps/controls";
import { playerKeys, usePlayer } from "../steps/player";
import type { Film, Stop, Summary } from "../steps/types";
import { StepView } from "../steps/view";

export function Tour({ argument }: PageProps) {
  const [stops, setStops] = useState<Stop[] | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    getJson<{ data: Stop[] }>("/v1/tour").then(
      (told) => setStops(told.data),
      (reason: Error) => setError(reason.message),
    );
  }, []);
  if (error) return <p class="notice">{error}</p>;
  if (!stops) return <p class="hint">Loading.</p>;
  const at = Math.max(0, stops.findIndex((each) => each.name === argument));
  const stop = stops[at]!;
  return (
    <>
      <nav class="stops" aria-label="Stops of the tour">
        <ol>
          {stops.map((each) => (
            <li key={each.name}>
              <a href={href("tour", each.name)} aria-current={each === stop ? "step" : undefined}>
                {each.title}
              </a>
            </li>
          ))}
        </ol>
      </nav>
      <Panel title={stop.title} wide>
        <p class="prose">{stop.text}</p>
        <p class="prose">
          <strong>Look at:</strong> {stop.look_at}
        </p>
        <p>
          {at > 0 && <a href={href("tour", stops[at - 1]!.name)}>Back: {stops[at - 1]!.title}</a>}{" "}
          {at < stops.length - 1 && <a href={href("tour", stops[at + 1]!.name)}>Next: {stops[at + 1]!.title}</a>}
        </p>
      </Panel>
      <Runs key={stop.name} stop={stop} />
    </>
  );
}

function Runs({ stop }: { stop: Stop }) {
  const [films, setFilms] = useState<Film[] | null>(null);
  const [error, setError] = useState("");
  const [chosen, choose] = useState<string | null>(null);
  useEffect(() => {
    Promise.all(stop.runs.map((run) => sendJson<Film>("POST", "/v1/simulations", run.scenario))).then(
      setFilms,
      (reason: Error) => setError(reason.message),
    );
  }, [stop]);
  const times = useMemo(() => timesOf(films ?? []), [films]);
  const player = usePlayer(times.length);
  if (error) return <p class="notice">{error}</p>;
  if (!films) return <p class="hint">Simulating.</p>;
  const now = times[player.at] ?? 0;
  return (
    <section
      class="stage"
      aria-label="Simulation; arrow keys move by one step"
      tabIndex={0}
      onKeyDown={playerKeys(player)}
    >
      <Controls player={player} place={`${seconds(now)} of ${seconds(times.at(-1))}`} />
      <div class={films.length > 1 ? "beside" : ""}>
        {films.map((film, at) => (
          <StepView
            key={at}
            film={film}
            at={stepAt(film, now)}
            chosen={chosen}
            choose={choose}
            title={stop.runs[at]!.caption}
            beside={films.length > 1}
          />
        ))}
      </div>
      <Panel title="The whole run" wide>
        <Figures films={films} captions={stop.runs.map((run) => run.caption)} />
      </Panel>
    </section>
  );
}

const FIGURES: [string, (summary: Summary) => string][] = [
  ["Steps", (each) => count(each.steps)],
  ["Time", (each) => seconds(each.seconds)],
  ["Output tokens per second", (each) => rate(each.output_tokens_per_second)],
  ["Mean time to first token", (each) => seconds(each.mean_ttft_seconds)],
  ["Mean time to the end", (each) => seconds(each.mean_e2e_seconds)],
  ["Mean rows of a step", (each) => each.mean_rows.toFixed(2)],
  ["Computed tokens", (each) => count(each.computed_tokens)],
  ["Preemptions", (each) => count(each.preemptions)],
];

function Figures({ films, captions }: { films: Film[]; captions: string[] }) {
  return (
    <Table
      caption="Figures of the whole run"
      rows={FIGURES}
      rowKey={(row) => row[0]}
      empty=""
      columns={[
        { title: "Figure", cell: (row) => row[0] },
        ...films.map((film, at) => ({
          title: captions[at]!,
          number: true,
          cell: (row: (typeof FIGURES)[number]) => row[1](film.summary),
        })),
      ]}
    />
  );
}

/** The ends of all steps of all films, in order: the films run on one clock. */
function timesOf(films: Film[]): number[] {
  return [...new Set(films.flatMap((film) => film.steps.map((step) => step.ended)))].sort((a, b) => a - b);
}

/** The last step that has ended by `now`; the first one before that. */
function stepAt(film: Film, now: number): number {
  return Math.max(0, film.steps.findLastIndex((step) => step.ended <= now));
}
