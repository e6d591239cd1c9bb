// All blocks of the KV memory as a picture, and the block table of the chosen request.

import { count } from "../format";
import { short } from "./grid";
import type { Memory } from "./types";

const SIZE = 18;
const SMALL = 8;
const STATES: Record<string, string> = {
  u: "used",
  s: "shared",
  k: "copied",
  c: "cached",
  f: "free",
};

export function Blocks({ memory, chosen, fresh }: { memory: Memory; chosen: string | null; fresh: Set<number> }) {
  const size = memory.cells.length > 320 ? SMALL : SIZE;
  const table = chosen === null ? undefined : memory.tables[chosen];
  const number = new Map(table?.map((block, place) => [block * 1, place + 1]));
  const counts = Object.keys(STATES).map((letter) => [letter, [...memory.cells].filter((each) => each === letter).length] as const);
  const per = memory.blocks_per_cell;
  return (
    <>
      <div class="blocks" role="img" aria-label={`${count(memory.held)} of ${count(memory.total)} blocks are used`}>
        {[...memory.cells].map((letter, cell) => (
          <span
            key={cell}
            class={`block ${STATES[letter]} ${size === SMALL ? "small" : ""} ${number.has(cell) ? "chosen" : ""} ${
              fresh.has(cell) && per === 1 ? "fresh" : ""
            }`}
          >
            {size === SIZE ? (number.get(cell) ?? "") : ""}
          </span>
        ))}
      </div>
      <ul class="legend">
        {counts.map(([letter, cells]) => (
          <li key={letter}>
            <span class={`block small ${STATES[letter]}`} aria-hidden="true" /> {STATES[letter]} {count(cells * per)}
          </li>
        ))}
        {memory.host > 0 && <li>host memory {count(memory.host)}</li>}
        {memory.disk > 0 && <li>disk {count(memory.disk)}</li>}
      </ul>
      {per > 1 && <p class="hint">One in {count(per)} blocks is shown; the counts are estimates.</p>}
      {table && (
        <p class="hint">
          Block table of {short(chosen!)}: {table.join(", ")}. The numbers in the picture are its order.
        </p>
      )}
    </>
  );
}
