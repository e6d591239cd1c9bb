// One experiment on live traffic: what was measured over time, effects with their intervals, and the button that stops it.

import { useState } from "preact/hooks";
import { sendJson } from "../api";
import { change, count, number, seconds, setting, words } from "../format";
import { usePolled } from "../polled";
import type { Experiment, ExperimentDetail, ExperimentPoint, ExperimentWindow } from "../steering";
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
  const measured = detail.value?.windows ?? [];
  return (
    <Panel
      title={`Live: ${words(experiment.setting)} ${setting(experiment.control)} → ${setting(experiment.treatment)}`}
      wide
      note={`${experiment.why || "running"}. ${progress(experiment)}.`}
    >
      {measured.length > 0 &&
        (experiment.units ? (
          <Curve points={measured as ExperimentPoint[]} metric={experiment.metric} />
        ) : (
          <Windows windows={measured as ExperimentWindow[]} metric={experiment.metric} />
        ))}
      <Effects experiment={experiment} />
      {experiment.status === "running" && (
        <button type="button" onClick={() => void stop()}>
          Stop this experiment
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

/** The metric in each pair of windows. */
function Windows({ windows, metric }: { windows: ExperimentWindow[]; metric: string }) {
  const of = (arm: string) =>
    windows.filter((each) => each.arm === arm).map((each) => (each[metric] as number | null) ?? null);
  return (
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
  );
}

/** The effect and its interval over time. */
function Curve({ points, metric }: { points: ExperimentPoint[]; metric: string }) {
  return (
    <Plot
      label={`Effect on ${words(metric)} over time, in seconds`}
      x={points.map((each) => each.seconds)}
      lines={[
        { label: "effect", values: points.map((each) => each.change) },
        { label: "lower bound", values: points.map((each) => each.interval?.[0] ?? null) },
        { label: "upper bound", values: points.map((each) => each.interval?.[1] ?? null) },
      ]}
      format={change}
      numbers
    />
  );
}

function Effects({ experiment }: { experiment: Experiment }) {
  const guards = Object.entries(experiment.guard_effects).map(([name, effect]) => ({
    name,
    role: `guard, ${Math.round(100 * (experiment.guards[name] ?? 0))} % worse at most`,
    effect,
  }));
  return (
    <Table
      caption="Effects on the metric and on the guards"
      rows={[{ name: experiment.metric, role: "metric", effect: experiment.effect }, ...guards]}
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
