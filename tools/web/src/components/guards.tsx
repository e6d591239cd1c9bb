// The guards of an experiment: metrics, and how much worse each may become.

import { words } from "../format";
import type { Metric } from "../steering";
import { Field } from "./field";

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
          <Field label={`Guard ${at + 1}`} error={error(guard.metric)}>
            {(props) => (
              <select {...props} value={guard.metric} onChange={(event) => set(at, { metric: event.currentTarget.value })}>
                {metrics.map(([name]) => (
                  <option key={name} value={name}>
                    {words(name)}
                  </option>
                ))}
              </select>
            )}
          </Field>
          <Field label={`Guard ${at + 1}: worse by at most (%)`}>
            {(props) => (
              <input
                {...props}
                type="number"
                step="any"
                required
                value={guard.percent}
                onInput={(event) => set(at, { percent: event.currentTarget.value })}
              />
            )}
          </Field>
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
