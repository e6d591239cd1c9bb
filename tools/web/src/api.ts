// Requests to the server's API. Paths are relative to the page, so that the server may be mounted under a prefix.

import { authorization } from "./key";

/** The server's answer was an error; `status` is 401 or 403 if the key does not suffice. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = { ...authorization(), ...(init.headers as Record<string, string> | undefined) };
  const response = await fetch(path.replace(/^\//, ""), { ...init, headers, cache: "no-store" });
  if (!response.ok) throw new ApiError(response.status, await message(response));
  return response;
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request(path, { signal: signal ?? null })).json() as Promise<T>;
}

export async function sendJson<T>(method: string, path: string, body?: unknown): Promise<T> {
  const init: RequestInit = { method };
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { "Content-Type": "application/json" };
  }
  return (await request(path, init)).json() as Promise<T>;
}

async function message(response: Response): Promise<string> {
  try {
    const body = (await response.json()) as { error?: { message?: string } };
    return body.error?.message ?? response.statusText;
  } catch {
    return response.statusText || `status ${response.status}`;
  }
}
