// Documents of /v1/experiments and /v1/tuner.

export interface EffectOf {
  /** `relative`: changes are shares of the control's value; `difference`: differences of two shares. */
  scale: "relative" | "difference";
  change: number | null;
  /** Always-valid confidence interval of the change. */
  interval: [number, number] | null;
  e_value: number;
}

/** The value of a setting: a number, or one of its choices. */
export type Value = number | string;

export interface Experiment {
  id: string;
  name: string;
  /** `switchback` measures pairs of windows; the other designs divide requests or tenants. */
  design: string;
  unit: string;
  adopt: boolean;
  setting: string;
  control: Value;
  treatment: Value;
  metric: string;
  guards: Record<string, number>;
  window_seconds: number;
  status: string;
  why: string;
  arm: string;
  pairs: number;
  units?: { control: number; treatment: number };
  effect: EffectOf;
  guard_effects: Record<string, EffectOf>;
  /** Control against control (A/A), of so many comparisons. */
  check?: EffectOf & { comparisons: number };
  detectable: { most_pairs: number; smallest_change: number | null };
}

/** One measured window of a pair, with each metric by its name. */
export interface ExperimentWindow {
  pair: number;
  arm: string;
  load: number;
  [metric: string]: number | string | null;
}

/** The effect after some time: after so many pairs, or seconds with so many units. `check` is control against control. */
export interface CurvePoint extends EffectOf {
  pairs?: number;
  seconds?: number;
  units?: number;
  /** Points of older files have none. */
  check?: EffectOf;
}

export interface ExperimentDetail extends Experiment {
  windows: ExperimentWindow[];
  curve: CurvePoint[];
}

/** An experiment in the simulator; results of the command line have no curve. */
export interface DryRun extends Experiment {
  curve?: CurvePoint[];
  /** What the server has simulated: requests and seconds of traffic, from so many requests of its own. */
  simulated?: { requests: number; seconds: number; recorded_requests: number };
}

export interface Metric {
  better: "more" | "less";
  units: string[];
  help: string;
}

export interface Setting {
  value: Value;
  low?: number;
  high?: number;
  choices?: string[];
  units: string[];
  help: string;
}

export interface ExperimentList {
  data: Experiment[];
  settings: Record<string, Setting>;
  metrics: Record<string, Metric>;
}

export interface TunerReport {
  mode: "off" | "advise" | "on";
  metric: string;
  guards: Record<string, number>;
  settings: Record<string, { value: number; low: number; high: number; factor: number }>;
  /** Measured over rehearsed time per token in the last scene. */
  measured_to_rehearsed: number | null;
  /** The change that has been made and is not confirmed yet. */
  probation: string | null;
  /** Times are the engine's. */
  log: { at: number; what: string }[];
}
