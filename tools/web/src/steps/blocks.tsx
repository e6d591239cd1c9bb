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
  const number = new Map(table?.map((block, place) => [block, place + 1]));
  const per = memory.blocks_per_cell;
  const rest = Math.max(0, memory.total - memory.cells.length * per);
  const counts = Object.keys(STATES).map((letter) => {
    const cells = [...memory.cells].filter((each) => each === letter).length;
    return [letter, cells * per + (letter === "f" ? rest : 0)] as const;
  });
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
        {counts.map(([letter, blocks]) => (
          <li key={letter}>
            <span class={`block small ${STATES[letter]}`} aria-hidden="true" /> {STATES[letter]} {count(blocks)}
          </li>
        ))}
        {memory.host > 0 && <li>host memory {count(memory.host)}</li>}
        {memory.disk > 0 && <li>disk {count(memory.disk)}</li>}
      </ul>
      {(per > 1 || rest > 0) && (
        <p class="hint">
          {per > 1 && `One in ${count(per)} blocks is shown, so the counts are estimates. `}
          {rest > 0 && `${count(rest)} blocks that were never used are not shown.`}
        </p>
      )}
      {table && (
        <p class="hint">
          Block table of {short(chosen!)}: {table.join(", ")}. The numbers in the picture are its order.
        </p>
      )}
    </>
  );
}
