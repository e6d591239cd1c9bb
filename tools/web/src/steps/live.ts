// The steps of this server, polled while the page is open; the server records them only while somebody asks.

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, getJson } from "../api";
import type { Film } from "./types";

const EVERY_MS = 500;
const KEPT = 1000;

/** The film of the last steps with the block table of the chosen request, and why there is none. */
export function useLiveFilm(on: boolean, chosen: string | null): { film: Film | null; error: string } {
  const [film, setFilm] = useState<Film | null>(null);
  const [error, setError] = useState("");
  const kept = useRef<Film | null>(null);
  useEffect(() => {
    kept.current = null;
  }, [on]);
  useEffect(() => {
    if (!on) return;
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const look = async () => {
      try {
        const after = kept.current?.steps.at(-1)?.step ?? -1;
        kept.current = joined(kept.current, await getJson<Film>(`/v1/steps?after=${after}&request=${encodeURIComponent(chosen ?? "")}`, abort.signal));
        setFilm(kept.current);
        setError("");
      } catch (reason) {
        if (abort.signal.aborted) return;
        setError(reason instanceof Error ? reason.message : String(reason));
        if (reason instanceof ApiError && reason.status < 500) return; // asking again would not help
      }
      timer = setTimeout(look, EVERY_MS);
    };
    void look();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [on, chosen]);
  return { film, error };
}

function joined(old: Film | null, more: Film): Film {
  const last = more.steps.at(-1);
  if (last && more.memory) last.memory = more.memory; // so that the page can go back to it
  if (!old) return more;
  if (!last) return { ...old, memory: more.memory ?? old.memory ?? null };
  const requests = new Map([...old.requests, ...more.requests].map((each) => [each.id, each]));
  const steps = [...old.steps, ...more.steps].slice(-KEPT);
  const shown = new Set(steps.flatMap((step) => [...step.rows.map((row) => row.id), ...step.queue.map((each) => each.id)]));
  return { ...more, steps, requests: [...requests.values()].filter((each) => shown.has(each.id)) };
}
