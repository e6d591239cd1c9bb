// The API key of this browser tab: kept in sessionStorage, sent as a bearer token, never part of an address.

const NAME = "headrace.key";

export function readKey(): string {
  return sessionStorage.getItem(NAME) ?? "";
}

export function writeKey(key: string): void {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
}

export function authorization(): Record<string, string> {
  const key = readKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}
