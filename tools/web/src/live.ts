// What the pages know: the newest snapshot, and the overviews of the last five minutes. One stream serves all pages.

import { useEffect, useState } from "preact/hooks";
import { ApiError } from "./api";
import { events } from "./stream";
import type { Snapshot } from "./types";

const KEPT = 300;
const RETRY_MS = 2000;

export type Connection = "connecting" | "live" | "lost" | "key" | "refused";

export interface Live {
  connection: Connection;
  error: string;
  snapshot: Snapshot | null;
  history: Snapshot[];
}

const EMPTY: Live = { connection: "connecting", error: "", snapshot: null, history: [] };
let live: Live = EMPTY;
let abort: AbortController | null = null;
const listeners = new Set<(live: Live) => void>();

function change(next: Partial<Live>): void {
  live = { ...live, ...next };
  for (const listener of listeners) listener(live);
}

/** Follow the stream with one part beside the overview; the stream before it ends. */
export function follow(part: string | undefined): void {
  abort?.abort();
  const mine = (abort = new AbortController());
  void run(`/v1/dashboard/stream${part ? `?part=${part}` : ""}`, mine.signal);
}

/** Forget everything, for another key. */
export function forget(): void {
  change({ ...EMPTY });
}

async function run(path: string, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    try {
      for await (const snapshot of events<Snapshot>(path, signal)) take(snapshot);
      change({ connection: "lost", error: "The server closed the stream." });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) {
        change({ connection: "key", error: error.message });
        return;
      }
      if (error instanceof ApiError && error.status === 403) {
        change({ connection: "refused", error: error.message });
        return;
      }
      change({ connection: "lost", error: error instanceof Error ? error.message : String(error) });
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function take(snapshot: Snapshot): void {
  const { requests: _requests, ...small } = snapshot; // the list is large, and only the newest one is shown
  change({
    connection: "live",
    error: "",
    snapshot,
    history: [...live.history.slice(1 - KEPT), small],
  });
}

export function useLive(): Live {
  const [shown, show] = useState(live);
  useEffect(() => {
    listeners.add(show);
    show(live);
    return () => void listeners.delete(show);
  }, []);
  return shown;
}
