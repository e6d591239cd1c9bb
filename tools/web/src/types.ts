// The snapshots of /v1/dashboard/stream, as headrace/observe/dashboard.py makes them. Null: not measured, or not shown
// to this key.

/** p50, p95 and p99, in seconds. */
export type Quantiles = [number, number, number];

export interface Bottleneck {
  kind: "slots" | "memory" | "arithmetic" | "bandwidth" | "front_end" | "idle";
  sentence: string;
}

export interface ServiceClass {
  name: string;
  waiting: number;
  running: number;
  goodput: number | null;
  met: number;
  missed: number;
}

export interface Overview {
  /** The tenant whose figures these are; null: the whole server's. */
  tenant: string | null;
  running: number;
  waiting: number;
  slots: number | null;
  rates: {
    requests: number;
    prompt_tokens: number;
    cached_tokens: number;
    output_tokens: number;
    steps: number | null;
  } | null;
  latency: { requests: number; ttft: Quantiles | null; tpot: Quantiles | null; e2e: Quantiles | null };
  batch: { bounds: number[]; counts: number[] } | null;
  kv: { usage: number; waste: number; blocks: number } | null;
  shares: { computing: number; idle: number; overhead: number } | null;
  caches: Record<string, { hits: number; hit_rate: number | null }>;
  classes: ServiceClass[] | null;
  cost: { currency: string; per_million_tokens: number | null; per_hour: number | null; total: number } | null;
  bottleneck: Bottleneck | null;
  /** Of the whole server: the parameters of the model, and those that compute one token. */
  model?: { num_parameters: number; active_parameters: number };
}

/** One request: see COLUMNS in headrace/observe/dashboard.py. */
export interface RequestRow {
  id: string;
  state: string;
  why: string;
  tenant: string;
  service_class: string;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  age_seconds: number;
  ttft_seconds: number | null;
  preemptions: number;
}

export interface CacheLayer {
  hits: number;
  misses?: number;
  hit_rate?: number | null;
  lookup_seconds_mean?: number | null;
  saved_prompt_tokens: number;
  saved_output_tokens: number;
  saved_cost: number;
  audited_right?: number;
  audited_wrong?: number;
  misses_by_reason?: Record<string, number>;
  stores?: Record<string, { entries: number | null; bytes: number | null; evictions: number }>;
}

export interface Caches {
  layers: Record<string, CacheLayer>;
  bypasses?: Record<string, number>;
  faults?: Record<string, number>;
}

export interface Tenant {
  name: string;
  weight: number;
  open_requests: number;
  requests: number;
  tokens: number;
  /** Share of the tokens of the last minute, and the share that weights and demand entitle it to. */
  share: number;
  fair_share: number;
  refused: number;
  cost: number;
  device_seconds: number;
  limits: Record<string, { limit: number; remaining: number; reset_seconds: number }>;
}

export interface Tenants {
  jain: number | null;
  currency: string;
  tenants: Tenant[];
  more: number;
}

export interface Snapshot {
  /** Unix time, and the engine's time, in seconds. */
  time: number;
  now: number;
  overview: Overview;
  requests?: { columns: string[]; rows: unknown[][]; more: number };
  caches?: Caches;
  tenants?: Tenants;
}
