// Experiments: effect, interval and plot of each; the result of a dry run beside the live one.

import { useState } from "preact/hooks";
import { DryRuns } from "../components/dry-run";
import { Effect } from "../components/effect";
import { ExperimentForm } from "../components/experiment-form";
import { LiveExperiment, progress } from "../components/live-experiment";
import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { number, setting, words } from "../format";
import { usePolled } from "../polled";
import type { DryRun, ExperimentList, Setting } from "../steering";

const EVERY_MS = 2000;
const MOST_DRY = 20;

/** Dry runs of this visit: they survive a look at another page. */
let kept: DryRun[] = [];

export function Experiments({ argument }: { argument: string }) {
  const list = usePolled<ExperimentList>("/v1/experiments", EVERY_MS);
  const [chosen, choose] = useState(argument);
  const [dry, setDry] = useState(kept);
  const load = (more: DryRun[]) => setDry((kept = [...kept, ...more].slice(-MOST_DRY)));
  const experiments = list.value?.data ?? [];
  const shown = experiments.find((each) => each.id === chosen) ?? experiments[0];
  if (list.error) return <p class="notice">{list.error}</p>;
  if (!list.value) return <p class="hint">Loading.</p>;
  return (
    <div class="panels">
      <Panel title="Experiments" wide note="One runs at a time. headrace experiment start FILE begins one too.">
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
            { title: "Change", cell: (row) => `${setting(row.control)} → ${setting(row.treatment)}` },
            { title: "Unit", cell: (row) => row.unit },
            { title: "Status", cell: (row) => <span class={`state ${row.status}`}>{words(row.status)}</span> },
            { title: "Metric", cell: (row) => words(row.metric) },
            { title: "Effect", cell: (row) => <Effect effect={row.effect} /> },
            { title: "Measured", cell: (row) => progress(row) },
          ]}
        />
      </Panel>
      {shown && <LiveExperiment key={shown.id} experiment={shown} stopped={list.again} />}
      <ExperimentForm
        known={list.value}
        started={(experiment) => (choose(experiment.id), list.again())}
        simulated={(result) => load([result])}
      />
      <DryRuns live={shown} dry={dry} load={load} />
      <Panel title="Settings that may change">
        <Table
          caption="Settings that experiments may change"
          rows={Object.entries(list.value.settings)}
          rowKey={([name]) => name}
          empty="None."
          columns={[
            { title: "Setting", cell: ([name, it]) => <span title={it.help}>{words(name)}</span> },
            { title: "Value", number: true, cell: ([, it]) => setting(it.value) },
            { title: "Bounds", cell: ([, it]) => bounds(it) },
            { title: "Units", cell: ([, it]) => it.units.join(", ") },
          ]}
        />
      </Panel>
    </div>
  );
}

function bounds({ low, high, choices }: Setting): string {
  return choices ? choices.join(", ") : `${number(low)} to ${number(high)}`;
}
