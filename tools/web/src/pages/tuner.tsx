// Tuner: its mode, the settings with their bounds, and what it has tried, each with its reason.

import { useState } from "preact/hooks";
import { sendJson } from "../api";
import { Bar } from "../components/bar";
import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { number, seconds, words } from "../format";
import { useLive } from "../live";
import { usePolled } from "../polled";
import type { TunerReport } from "../steering";

const EVERY_MS = 2000;
const MODES: Record<TunerReport["mode"], string> = {
  off: "Off: settings stay as they are",
  advise: "Advise: rehearse changes and report the better ones",
  on: "On: make changes that are better, and undo those that are not",
};

export function Tuner() {
  const tuner = usePolled<TunerReport>("/v1/tuner", EVERY_MS);
  const { snapshot } = useLive();
  if (tuner.error) return <p class="notice">{tuner.error}</p>;
  if (!tuner.value) return <p class="hint">Loading.</p>;
  const report = tuner.value;
  const now = snapshot?.now ?? null;
  return (
    <div class="panels">
      <Mode report={report} again={tuner.again} />
      <Panel title="Settings" note={`The tuner lowers ${words(report.metric)}; guards bound what may become worse.`}>
        <Table
          caption="Settings of the tuner"
          rows={Object.entries(report.settings)}
          rowKey={([name]) => name}
          empty="There is no setting that the tuner may change."
          columns={[
            { title: "Setting", cell: ([name]) => words(name) },
            { title: "Value", number: true, cell: ([, it]) => number(it.value) },
            { title: "Within its bounds", cell: ([name, it]) => <Bar value={place(it)} label={`${words(name)} within bounds`} /> },
            { title: "Bounds", number: true, cell: ([, it]) => `${number(it.low)} to ${number(it.high)}` },
          ]}
        />
      </Panel>
      <Panel title="Changes" wide note="Newest first. A change is rehearsed before it is made, and measured afterwards.">
        <Table
          caption="Changes that the tuner has made or advised, with their results"
          rows={[...report.log].reverse()}
          rowKey={(row) => `${row.at} ${row.what}`}
          empty="The tuner has made no change yet."
          columns={[
            { title: "When", cell: (row) => (now == null ? "–" : `${seconds(Math.max(0, now - row.at))} ago`) },
            { title: "Change and reason", cell: (row) => words(row.what) },
          ]}
        />
      </Panel>
    </div>
  );
}

function Mode({ report, again }: { report: TunerReport; again: () => void }) {
  const [failed, setFailed] = useState("");
  const set = async (mode: string) => {
    try {
      await sendJson("POST", "/v1/tuner", { mode });
      setFailed("");
    } catch (error) {
      setFailed(error instanceof Error ? error.message : String(error));
    }
    again();
  };
  return (
    <Panel title="Mode">
      <fieldset>
        <legend class="hidden">Mode of the tuner</legend>
        {Object.entries(MODES).map(([mode, text]) => (
          <label key={mode} class="choice">
            <input type="radio" name="mode" checked={report.mode === mode} onChange={() => void set(mode)} />
            {text}
          </label>
        ))}
      </fieldset>
      <p>
        {report.probation ? `On probation: ${words(report.probation)}.` : "No change is on probation."}
        {report.measured_to_rehearsed != null &&
          ` Requests took ${number(report.measured_to_rehearsed)} times as long as rehearsed in the last scene.`}
      </p>
      {failed && (
        <p class="notice" role="alert">
          {failed}
        </p>
      )}
    </Panel>
  );
}

/** Where a value lies between its bounds, on a logarithmic scale, as the steps are factors. */
function place({ value, low, high }: { value: number; low: number; high: number }): number {
  return high > low && low > 0 && value > 0 ? Math.log(value / low) / Math.log(high / low) : 0;
}
