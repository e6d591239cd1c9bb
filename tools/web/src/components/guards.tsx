// The guards of an experiment: metrics, and how much worse each may become.

import { words } from "../format";
import type { Metric } from "../steering";
import { NumberField, SelectField } from "./field";

export interface Guard {
  metric: string;
  /** Percent, as it is typed. */
  percent: string;
}

interface Props {
  guards: Guard[];
  metrics: [string, Metric][];
  /** The server's error about one guard, by its metric. */
  error: (metric: string) => string | undefined;
  change: (guards: Guard[]) => void;
}

export function Guards({ guards, metrics, error, change }: Props) {
  const set = (at: number, next: Partial<Guard>) =>
    change(guards.map((each, place) => (place === at ? { ...each, ...next } : each)));
  const free = metrics.find(([name]) => guards.every((each) => each.metric !== name));
  return (
    <fieldset class="guards">
      <legend>Guards</legend>
      <p class="hint">A guard ends the experiment and restores the setting as soon as its metric is worse than allowed.</p>
      {guards.map((guard, at) => (
        <div key={at} class="guard">
          <SelectField
            label={`Guard ${at + 1}`}
            error={error(guard.metric)}
            value={guard.metric}
            change={(metric) => set(at, { metric })}
            options={metrics.map(([name]) => [name, words(name)])}
          />
          <NumberField
            label={`Guard ${at + 1}: worse by at most (%)`}
            value={guard.percent}
            change={(percent) => set(at, { percent })}
          />
          <button
            type="button"
            class="quiet"
            aria-label={`Remove guard ${at + 1}`}
            onClick={() => change(guards.filter((_, place) => place !== at))}
          >
            Remove
          </button>
        </div>
      ))}
      {free && (
        <button type="button" class="quiet" onClick={() => change([...guards, { metric: free[0], percent: "20" }])}>
          Add a guard
        </button>
      )}
    </fieldset>
  );
}
