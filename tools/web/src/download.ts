// Saves what the API returns as a file; a plain link could not send the key.

import { request } from "./api";

export async function download(path: string, name: string, init: RequestInit = {}): Promise<void> {
  const content = await (await request(path, init)).blob();
  save(content, name);
}

export function save(content: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
