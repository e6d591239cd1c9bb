// The digest of the sources that the built files are made of. tests/tools/test_web.py computes the same in Python.

import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const FILES = ["package-lock.json", "package.json", "sources.ts", "tsconfig.json", "vite.config.ts"];
const FOLDERS = ["src", "static"];

export function digest(content: string | Buffer): string {
  return createHash("sha256").update(content).digest("hex");
}

/** All files of a folder, with paths relative to `root` and `/` as separator. */
function walk(root: string, folder: string): string[] {
  return readdirSync(join(root, folder), { withFileTypes: true }).flatMap((entry) => {
    const path = `${folder}/${entry.name}`;
    return entry.isDirectory() ? walk(root, path) : [path];
  });
}

/** SHA-256 over one line for each source: its path and the digest of its content, in the order of the paths. */
export function sourcesDigest(root: string): string {
  const paths = [...FILES, ...FOLDERS.flatMap((folder) => walk(root, folder))].sort();
  const lines = paths.map((path) => `${path} ${digest(readFileSync(join(root, path)))}\n`);
  return digest(lines.join(""));
}
