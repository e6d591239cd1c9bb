// A relative change with its confidence interval: as text, and as a line around zero.

import { change } from "../format";
import type { EffectOf } from "../steering";

const MOST = 0.5; // the line shows changes of up to 50 %

function place(value: number): number {
  return 50 + (50 * Math.max(-MOST, Math.min(MOST, value))) / MOST;
}

export function Effect({ effect }: { effect: EffectOf }) {
  if (effect.change == null) return <>not measured yet</>;
  const text = effect.interval
    ? `${change(effect.change)} (${change(effect.interval[0])} to ${change(effect.interval[1])})`
    : `${change(effect.change)} (no interval yet)`;
  const unit = effect.scale === "difference" ? ", difference of shares" : "";
  return (
    <span class="effect">
      <span class="axis" aria-hidden="true">
        {effect.interval && (
          <span
            class="interval"
            style={{
              left: `${place(effect.interval[0])}%`,
              width: `${place(effect.interval[1]) - place(effect.interval[0])}%`,
            }}
          />
        )}
        <span class="point" style={{ left: `${place(effect.change)}%` }} />
      </span>
      {text}
      {unit}
    </span>
  );
}
