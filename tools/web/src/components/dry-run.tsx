// The result of the same experiment in the simulator, read from a file, beside the live result.

import { useState } from "preact/hooks";
import { setting, words } from "../format";
import type { Experiment } from "../steering";
import { Effect } from "./effect";
import { progress } from "./live-experiment";
import { Panel } from "./panel";
import { Table } from "./table";

interface Props {
  live: Experiment;
  dry: Experiment[];
  load: (dry: Experiment[]) => void;
}

/** What `headrace simulate --output` writes: one run, or several by their names. */
interface Result {
  experiments?: Experiment[];
  runs?: Record<string, Result>;
}

function experimentsOf(result: Result): Experiment[] {
  const found = [...(result.experiments ?? []), ...Object.values(result.runs ?? {}).flatMap(experimentsOf)];
  if (!found.length || !found.every((each) => each.effect && each.setting)) throw new Error("it has no experiments");
  return found;
}

export function DryRun({ live, dry, load }: Props) {
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
  const same = dry.filter((each) => each.setting === live.setting && each.treatment === live.treatment);
  const rows = [...same.map((each) => ({ from: `dry run, ${each.id}`, ...each })), { from: "live", ...live }];
  return (
    <Panel
      title="Dry run beside live"
      wide
      note="headrace simulate --experiment FILE --output RESULT.json runs the same experiment in virtual time."
    >
      <label>
        Result of a dry run
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
      {dry.length > 0 && !same.length && (
        <p class="hint">
          The file is about {words(dry[0]!.setting)} {setting(dry[0]!.control)} → {setting(dry[0]!.treatment)}, another
          change than the live one.
        </p>
      )}
      {same.length > 0 && (
        <Table
          caption="Dry run and live result"
          rows={rows}
          rowKey={(row) => `${row.from} ${row.metric}`}
          empty=""
          columns={[
            { title: "Run", cell: (row) => row.from },
            { title: "Metric", cell: (row) => words(row.metric) },
            { title: "Status", cell: (row) => words(row.status) },
            { title: "Effect and interval", cell: (row) => <Effect effect={row.effect} /> },
            { title: "Measured", cell: (row) => progress(row) },
          ]}
        />
      )}
    </Panel>
  );
}
