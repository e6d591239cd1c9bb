// Documents of /v1/experiments and /v1/tuner.

export interface EffectOf {
  change: number | null;
  /** Always-valid confidence interval of the change. */
  interval: [number, number] | null;
  e_value: number;
}

export interface Experiment {
  id: string;
  name: string;
  by: string;
  setting: string;
  control: number;
  treatment: number;
  metric: string;
  guards: Record<string, number>;
  window_seconds: number;
  status: string;
  why: string;
  arm: string;
  pairs: number;
  effect: EffectOf;
  guard_effects: Record<string, EffectOf>;
  detectable: { most_pairs: number; smallest_change: number | null };
}

export interface ExperimentWindow {
  pair: number;
  arm: string;
  load: number;
  [metric: string]: number | string | null;
}

export interface Setting {
  value: number;
  low: number;
  high: number;
  help: string;
}

export interface ExperimentList {
  data: Experiment[];
  settings: Record<string, Setting>;
}

export interface TunerReport {
  mode: "off" | "advise" | "on";
  metric: string;
  guards: Record<string, number>;
  settings: Record<string, { value: number; low: number; high: number; factor: number }>;
  trial: string | null;
  /** Times are the engine's. */
  log: { at: number; what: string }[];
}
