// Requests to the server's API. Paths are relative to the page, so that the server may be mounted under a prefix.

import { authorization } from "./key";

/** The server's answer was an error; `status` is 401 or 403 if the key does not suffice, `param` the field it names. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param = "",
  ) {
    super(message);
  }
}

export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = { ...authorization(), ...(init.headers as Record<string, string> | undefined) };
  const response = await fetch(path.replace(/^\//, ""), { ...init, headers, cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
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

async function errorOf(response: Response): Promise<ApiError> {
  try {
    const { error } = (await response.json()) as { error?: { message?: string; param?: string | null } };
    return new ApiError(response.status, error?.message ?? response.statusText, error?.param ?? "");
  } catch {
    return new ApiError(response.status, response.statusText || `status ${response.status}`);
  }
}
