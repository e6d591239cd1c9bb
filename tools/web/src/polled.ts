// A document of the API that is fetched again and again while a page is open.

import { useEffect, useState } from "preact/hooks";
import { ApiError, getJson } from "./api";

export interface Polled<T> {
  value: T | null;
  /** Why there is no value; a key that does not suffice has its own words. */
  error: string;
  /** Fetch it now. */
  again: () => void;
}

export function usePolled<T>(path: string | null, everyMs: number): Polled<T> {
  const [value, setValue] = useState<T | null>(null);
  const [error, setError] = useState("");
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (path === null) {
      setValue(null);
      return;
    }
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const look = async () => {
      try {
        setValue(await getJson<T>(path, abort.signal));
        setError("");
      } catch (reason) {
        if (abort.signal.aborted) return;
        setError(reason instanceof Error ? reason.message : String(reason));
        if (reason instanceof ApiError && reason.status < 500) return; // asking again would not help
      }
      timer = setTimeout(look, everyMs);
    };
    void look();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path, everyMs, round]);
  return { value, error, again: () => setRound((each) => each + 1) };
}
