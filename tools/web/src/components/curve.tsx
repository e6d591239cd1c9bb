// The effect of an experiment with its interval over time, and control against control (A/A) on the same scale of time.

import { change, words } from "../format";
import type { CurvePoint, EffectOf } from "../steering";
import { Plot } from "./plot";

interface Props {
  /** What is measured, for the labels. */
  metric: string;
  points: CurvePoint[];
}

export function Curve({ metric, points }: Props) {
  const over = points[0]?.pairs === undefined ? "seconds" : "pairs";
  const checked = points.filter((each) => each.check?.change != null);
  return (
    <div class="beside">
      <Effects title={`Treatment against control (A/B), ${words(metric)}, over ${over}`} points={points} of={(each) => each} />
      {checked.length > 1 && (
        <Effects title={`Control against control (A/A), over ${over}`} points={checked} of={(each) => each.check!} />
      )}
    </div>
  );
}

interface EffectsProps {
  title: string;
  points: CurvePoint[];
  of: (point: CurvePoint) => EffectOf;
}

function Effects({ title, points, of }: EffectsProps) {
  return (
    <figure>
      <figcaption>{title}</figcaption>
      <Plot
        label={title}
        x={points.map((each) => each.pairs ?? each.seconds!)}
        lines={[
          { label: "effect", values: points.map((each) => of(each).change) },
          { label: "lower bound", values: points.map((each) => of(each).interval?.[0] ?? null) },
          { label: "upper bound", values: points.map((each) => of(each).interval?.[1] ?? null) },
        ]}
        format={change}
        most={1}
        numbers
      />
    </figure>
  );
}
