// Dry runs in the simulator, made by the server or read from a file, beside the live experiment of the same change.

import { useState } from "preact/hooks";
import { many, seconds, setting, words } from "../format";
import type { DryRun, Experiment } from "../steering";
import { Curve } from "./curve";
import { Effect } from "./effect";
import { progress } from "./live-experiment";
import { Panel } from "./panel";
import { Table } from "./table";

interface Props {
  live: Experiment | undefined;
  dry: DryRun[];
  load: (dry: DryRun[]) => void;
}

/** What `headrace simulate --output` writes: one run, or several by their names. */
interface Result {
  experiments?: DryRun[];
  runs?: Record<string, Result>;
}

function experimentsOf(result: Result): DryRun[] {
  const found = [...(result.experiments ?? []), ...Object.values(result.runs ?? {}).flatMap(experimentsOf)];
  if (!found.length || !found.every((each) => each.effect && each.setting)) throw new Error("it has no experiments");
  return found;
}

function same(one: Experiment, other: Experiment): boolean {
  return one.setting === other.setting && one.treatment === other.treatment;
}

export function DryRuns({ live, dry, load }: Props) {
  const [wrong, setWrong] = useState("");
  const read = async (file: File | undefined) => {
    if (!file) return;
    try {
      load(experimentsOf(JSON.parse(await file.text()) as Result));
      setWrong("");
    } catch (error) {
      setWrong(`${file.name} is not the result of a dry run: ${error instanceof Error ? error.message : error}`);
    }
  };
  const fitting = live ? dry.filter((each) => same(each, live)) : [];
  const shown = fitting.length ? fitting : dry;
  const newest = shown.at(-1);
  const rows: (Experiment & { from: string })[] = shown.map((each) => ({ ...each, from: `dry run, ${each.id}` }));
  if (live && fitting.length) rows.push({ ...live, from: "live" });
  return (
    <Panel title="Dry run beside live" wide note={note(newest)}>
      {rows.length > 0 && (
        <Table
          caption="Dry run and live result"
          rows={rows}
          rowKey={(row) => `${row.from} ${row.metric}`}
          empty=""
          columns={[
            { title: "Run", cell: (row) => row.from },
            { title: "Change", cell: (row) => `${words(row.setting)} ${setting(row.control)} → ${setting(row.treatment)}` },
            { title: "Metric", cell: (row) => words(row.metric) },
            { title: "Status", cell: (row) => words(row.status) },
            { title: "Effect and interval", cell: (row) => <Effect effect={row.effect} /> },
            { title: "Measured", cell: (row) => progress(row) },
          ]}
        />
      )}
      {newest?.curve && newest.curve.length > 1 && <Curve metric={newest.metric} points={newest.curve} />}
      {live && dry.length > 0 && !fitting.length && (
        <p class="hint">
          The live experiment is about another change: {words(live.setting)} {setting(live.control)} →{" "}
          {setting(live.treatment)}.
        </p>
      )}
      <label class="file">
        Result of a dry run from a file
        <input
          type="file"
          accept=".json,application/json"
          onChange={(event) => void read(event.currentTarget.files?.[0])}
        />
      </label>
      {wrong && (
        <p class="notice" role="alert">
          {wrong}
        </p>
      )}
    </Panel>
  );
}

function note(newest: DryRun | undefined): string {
  if (newest?.simulated) {
    const { requests, recorded_requests } = newest.simulated;
    return (
      `${newest.why ? `${newest.why[0]!.toUpperCase()}${newest.why.slice(1)}. ` : ""}The newest dry run simulated ${seconds(newest.simulated.seconds)} of traffic with ${many(requests, "request")}, drawn ` +
      `from the last ${many(recorded_requests, "request")} of this server, with the step times that it has measured.`
    );
  }
  return (
    "Start one with the form above. Or run the same experiment with a load of your own: " +
    "headrace simulate --experiment FILE --output RESULT.json writes such a file."
  );
}
