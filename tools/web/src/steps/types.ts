// Steps of an engine, as GET /v1/steps, POST /v1/simulations and `headrace replay --steps` return them.
// headrace/observe/steps/document.py makes them. Times are seconds.

export interface Row {
  id: string;
  kind: "prefill" | "decode";
  start: number;
  length: number;
  new_blocks?: number[];
  drafted?: number;
  accepted?: number;
}

export interface StepEvent {
  id: string;
  event: "arrived" | "admitted" | "resumed" | "restored" | "preempted" | "finished";
  [fact: string]: unknown;
}

export interface Waiting {
  id: string;
  since: number;
  why: string;
}

export interface Memory {
  total: number;
  held: number;
  cached: number;
  host: number;
  disk: number;
  /** One letter for one in `blocks_per_cell` blocks: free, cached, used, copied (k), shared. The rest is free. */
  cells: string;
  blocks_per_cell: number;
  tables: Record<string, number[]>;
  /** The block table of the request that was asked for, of a live server: the first blocks, and how many of all. */
  table: {
    request_id: string;
    blocks: number[];
    total: number;
    shared: number;
    copied: number;
    host: number;
    disk: number;
  } | null;
}

export interface Step {
  step: number;
  began: number;
  ended: number;
  running: number;
  waiting: number;
  blocks_held: number;
  blocks_total: number;
  rows: Row[];
  events: StepEvent[];
  queue: Waiting[];
  memory?: Memory;
}

export interface Summary {
  steps: number;
  seconds: number;
  output_tokens: number;
  output_tokens_per_second: number;
  mean_ttft_seconds: number;
  mean_e2e_seconds: number;
  mean_rows: number;
  preemptions: number;
  computed_tokens: number;
}

export interface FilmRequest {
  id: string;
  arrived: number;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
}

export interface Film {
  object: "steps";
  source: "server" | "simulation" | "recording";
  settings: Record<string, string | number | boolean | null>;
  cut: boolean;
  steps: Step[];
  requests: FilmRequest[];
  summary: Summary;
  /** The present state of the blocks, of a live server. */
  memory?: Memory | null;
}

export interface ScenarioRequest {
  prompt_tokens: number;
  output_tokens: number;
  arrival: number;
  shared_tokens: number;
  quotes: boolean;
}

export interface Scenario {
  requests: ScenarioRequest[];
  scheduling_policy: "fair" | "fcfs" | "priority" | "static";
  max_num_seqs: number;
  max_num_batched_tokens: number;
  num_blocks: number;
  enable_chunked_prefill: boolean;
  enable_prefix_caching: boolean;
  num_speculative_tokens: number;
}

export interface Stop {
  name: string;
  title: string;
  text: string;
  look_at: string;
  runs: { caption: string; scenario: Scenario }[];
}

/** What a file holds, if it is a film. */
export function readFilm(text: string): Film {
  const film = JSON.parse(text) as Film;
  if (film.object !== "steps" || !Array.isArray(film.steps)) throw new Error("This file holds no steps.");
  return film;
}
