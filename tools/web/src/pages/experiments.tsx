// Experiments: effect, interval and plot of each; the result of a dry run beside the live one.

import { useState } from "preact/hooks";
import { sendJson } from "../api";
import { DryRun } from "../components/dry-run";
import { Effect } from "../components/effect";
import { Panel } from "../components/panel";
import { Plot } from "../components/plot";
import { Table } from "../components/table";
import { number, seconds, words } from "../format";
import { usePolled } from "../polled";
import type { Experiment, ExperimentList, ExperimentWindow } from "../steering";

const EVERY_MS = 2000;

export function Experiments({ argument }: { argument: string }) {
  const list = usePolled<ExperimentList>("/v1/experiments", EVERY_MS);
  const [chosen, choose] = useState(argument);
  const [dry, setDry] = useState<Experiment[]>([]);
  const experiments = list.value?.data ?? [];
  const shown = experiments.find((each) => each.id === chosen) ?? experiments[0];
  if (list.error) return <p class="notice">{list.error}</p>;
  if (!list.value) return <p class="hint">Loading.</p>;
  return (
    <div class="panels">
      <Panel title="Experiments" wide note="headrace experiment start FILE begins one.">
        <Table
          caption="Experiments, newest first"
          rows={experiments}
          rowKey={(row) => row.id}
          empty="There has been no experiment."
          columns={[
            {
              title: "Experiment",
              cell: (row) => (
                <button type="button" class="link" aria-pressed={row.id === shown?.id} onClick={() => choose(row.id)}>
                  {row.name || row.setting}
                </button>
              ),
            },
            { title: "By", cell: (row) => row.by || "request" },
            { title: "Change", cell: (row) => `${number(row.control)} → ${number(row.treatment)}` },
            { title: "Status", cell: (row) => <span class={`state ${row.status}`}>{words(row.status)}</span> },
            { title: "Metric", cell: (row) => words(row.metric) },
            { title: "Effect", cell: (row) => <Effect effect={row.effect} /> },
            { title: "Pairs", number: true, cell: (row) => number(row.pairs) },
          ]}
        />
      </Panel>
      {shown && <Live experiment={shown} stopped={list.again} />}
      {shown && <DryRun live={shown} dry={dry} load={setDry} />}
      <Panel title="Settings that may change">
        <Table
          caption="Settings that experiments may change"
          rows={Object.entries(list.value.settings)}
          rowKey={([name]) => name}
          empty="None."
          columns={[
            { title: "Setting", cell: ([name, it]) => <span title={it.help}>{words(name)}</span> },
            { title: "Value", number: true, cell: ([, it]) => number(it.value) },
            { title: "Bounds", number: true, cell: ([, it]) => `${number(it.low)} to ${number(it.high)}` },
          ]}
        />
      </Panel>
    </div>
  );
}

function Live({ experiment, stopped }: { experiment: Experiment; stopped: () => void }) {
  const whole = usePolled<Experiment & { windows: ExperimentWindow[] }>(`/v1/experiments/${experiment.id}`, EVERY_MS);
  const [failed, setFailed] = useState("");
  const windows = whole.value?.id === experiment.id ? whole.value.windows : [];
  const of = (arm: string) =>
    windows.filter((each) => each.arm === arm).map((each) => (each[experiment.metric] as number | null) ?? null);
  const stop = async () => {
    try {
      await sendJson("DELETE", `/v1/experiments/${experiment.id}`);
      stopped();
    } catch (error) {
      setFailed(error instanceof Error ? error.message : String(error));
    }
  };
  const pairs = [...new Set(windows.map((each) => each.pair + 1))];
  return (
    <Panel
      title={`Live: ${words(experiment.setting)} ${number(experiment.control)} → ${number(experiment.treatment)}`}
      wide
      note={`${experiment.why || `running, now ${experiment.arm}`}. Windows of ${seconds(experiment.window_seconds)}, ${
        experiment.pairs
      } of at most ${experiment.detectable.most_pairs} pairs.`}
    >
      {pairs.length > 0 && (
        <Plot
          label={`${words(experiment.metric)} of each pair of windows`}
          x={pairs}
          lines={[
            { label: "control", values: of("control") },
            { label: "treatment", values: of("treatment") },
          ]}
          format={(value) => (experiment.metric.endsWith("_seconds") ? seconds(value) : number(value))}
          numbers
        />
      )}
      <Table
        caption="Effects on the metric and on the guards"
        rows={[
          { name: experiment.metric, bound: null as number | null, effect: experiment.effect },
          ...Object.entries(experiment.guard_effects).map(([name, effect]) => ({
            name,
            bound: experiment.guards[name] ?? null,
            effect,
          })),
        ]}
        rowKey={(row) => `${row.name} ${row.bound}`}
        empty=""
        columns={[
          { title: "Measure", cell: (row) => words(row.name) },
          { title: "Role", cell: (row) => (row.bound == null ? "metric" : `guard, ${Math.round(100 * row.bound)} % worse at most`) },
          { title: "Effect and interval", cell: (row) => <Effect effect={row.effect} /> },
        ]}
      />
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
