// One experiment on live traffic: what was measured over time, effects with their intervals, and the button that stops it.

import { useState } from "preact/hooks";
import { sendJson } from "../api";
import { count, number, seconds, setting, share, words } from "../format";
import { usePolled } from "../polled";
import type { Experiment, ExperimentDetail, ExperimentWindow } from "../steering";
import { Curve } from "./curve";
import { Effect } from "./effect";
import { Panel } from "./panel";
import { Plot } from "./plot";
import { Table } from "./table";

const EVERY_MS = 2000;

interface Props {
  experiment: Experiment;
  stopped: () => void;
}

/** How much has been measured. */
export function progress(experiment: Experiment): string {
  if (!experiment.units) return `${count(experiment.pairs)} of at most ${count(experiment.detectable.most_pairs)} pairs`;
  return `${count(experiment.units.control)} control, ${count(experiment.units.treatment)} treatment`;
}

export function LiveExperiment({ experiment, stopped }: Props) {
  const detail = usePolled<ExperimentDetail>(`/v1/experiments/${experiment.id}`, EVERY_MS);
  const [failed, setFailed] = useState("");
  const stop = async () => {
    try {
      await sendJson("DELETE", `/v1/experiments/${experiment.id}`);
      stopped();
    } catch (error) {
      setFailed(error instanceof Error ? error.message : String(error));
    }
  };
  const { windows = [], curve = [] } = detail.value ?? {};
  const adopted = experiment.status === "better" && experiment.adopt;
  return (
    <Panel
      title={`Live: ${words(experiment.setting)} ${setting(experiment.control)} → ${setting(experiment.treatment)}`}
      wide
      note={noteOf(experiment)}
    >
      {curve.length > 1 && <Curve points={curve} metric={experiment.metric} />}
      {windows.length > 0 && <Windows windows={windows} metric={experiment.metric} />}
      <Effects experiment={experiment} />
      {(experiment.status === "running" || adopted) && (
        <button type="button" onClick={() => void stop()}>
          {adopted ? `Roll back to ${setting(experiment.control)}` : "Stop this experiment"}
        </button>
      )}
      {failed && (
        <p class="notice" role="alert">
          {failed}
        </p>
      )}
    </Panel>
  );
}

function noteOf(experiment: Experiment): string {
  const smallest = experiment.detectable.smallest_change;
  return [
    experiment.why || "running",
    progress(experiment),
    ...(smallest == null ? [] : [`it would find a change of ${share(smallest, 1)} within its maximum duration`]),
  ]
    .map((each) => `${each[0]!.toUpperCase()}${each.slice(1)}.`)
    .join(" ");
}

/** The metric in each pair of windows. */
function Windows({ windows, metric }: { windows: ExperimentWindow[]; metric: string }) {
  const of = (arm: string) =>
    windows.filter((each) => each.arm === arm).map((each) => (each[metric] as number | null) ?? null);
  return (
    <figure>
      <figcaption>{`${words(metric)} of each pair of windows`}</figcaption>
      <Plot
      label={`${words(metric)} of each pair of windows`}
      x={[...new Set(windows.map((each) => each.pair + 1))]}
      lines={[
        { label: "control", values: of("control") },
        { label: "treatment", values: of("treatment") },
      ]}
      format={(value) => (metric.endsWith("_seconds") ? seconds(value) : number(value))}
      numbers
      />
    </figure>
  );
}

function Effects({ experiment }: { experiment: Experiment }) {
  const guards = Object.entries(experiment.guard_effects).map(([name, effect]) => ({
    name,
    role: `guard, ${Math.round(100 * (experiment.guards[name] ?? 0))} % worse at most`,
    effect,
  }));
  const check = experiment.check?.comparisons
    ? [{ name: experiment.metric, role: "control against control (A/A)", effect: experiment.check }]
    : [];
  return (
    <Table
      caption="Effects on the metric and on the guards"
      rows={[{ name: experiment.metric, role: "metric", effect: experiment.effect }, ...check, ...guards]}
      rowKey={(row) => `${row.name} ${row.role}`}
      empty=""
      columns={[
        { title: "Measure", cell: (row) => words(row.name) },
        { title: "Role", cell: (row) => row.role },
        { title: "Effect and interval", cell: (row) => <Effect effect={row.effect} /> },
      ]}
    />
  );
}
