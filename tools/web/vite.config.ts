// Builds the pages into the Python package: one script, one style sheet, the files of static/, and a manifest.

import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";
import { digest, sourcesDigest } from "./sources";

const root = fileURLToPath(new URL(".", import.meta.url));
const outDir = join(root, "../../headrace/api/pages/static");

/** Writes manifest.json: the digest of the sources, and of each built file. */
function manifest(): Plugin {
  let folder = outDir;
  return {
    name: "manifest",
    configResolved(config) {
      folder = config.build.outDir;
    },
    closeBundle() {
      const names = readdirSync(folder).filter((name) => name !== "manifest.json").sort();
      const files = Object.fromEntries(names.map((name) => [name, digest(readFileSync(join(folder, name)))]));
      const text = JSON.stringify({ sources: sourcesDigest(root), files }, null, 2);
      writeFileSync(join(folder, "manifest.json"), `${text}\n`);
    },
  };
}

export default defineConfig({
  root,
  base: "./",
  publicDir: "static",
  plugins: [manifest()],
  build: {
    outDir,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    reportCompressedSize: true,
    rollupOptions: {
      input: join(root, "src/main.tsx"),
      output: { entryFileNames: "app.js", assetFileNames: "app[extname]", inlineDynamicImports: true },
    },
  },
});
