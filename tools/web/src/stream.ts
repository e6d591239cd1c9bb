// Server-sent events by fetch: EventSource cannot send a key.

import { request } from "./api";

/** The data of each event of a stream, parsed as JSON, until the stream ends or is aborted. */
export async function* events<T>(path: string, signal: AbortSignal, init: RequestInit = {}): AsyncGenerator<T> {
  const response = await request(path, { ...init, signal });
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      const data = part
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trim())
        .join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data) as T;
    }
  }
}
