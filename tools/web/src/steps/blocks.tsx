// All blocks of the KV memory as a picture, and the block table of the chosen request.

import { count, many } from "../format";
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
  const per = memory.blocks_per_cell;
  const table = chosen === null ? null : tableOf(memory, chosen);
  const number = new Map(table?.blocks.map((block, place) => [block / per, place + 1]));
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
      {table && <BlockTable name={short(chosen!)} table={table} numbered={size === SIZE && per === 1} />}
      {chosen !== null && !table && <p class="hint">{short(chosen)} holds no block now.</p>}
    </>
  );
}

interface Table {
  blocks: number[];
  total: number;
  shared: number;
  copied: number;
  /** Not known of a simulation. */
  host?: number;
  disk?: number;
}

/** The block table of a request, as the server has counted it, or counted by the picture. */
function tableOf(memory: Memory, chosen: string): Table | null {
  if (memory.table?.request_id === chosen) return memory.table;
  const blocks = memory.tables[chosen];
  if (!blocks) return null;
  const of = (letter: string) => blocks.filter((block) => memory.cells[block] === letter).length;
  return { blocks, total: blocks.length, shared: of("s"), copied: of("k") };
}

function BlockTable({ name, table, numbered }: { name: string; table: Table; numbered: boolean }) {
  const kinds = [
    `${count(table.shared)} shared`,
    `${count(table.copied)} copied`,
    ...(table.host ? [`${count(table.host)} also in host memory`] : []),
    ...(table.disk ? [`${count(table.disk)} also on disk`] : []),
  ];
  const rest = table.total - table.blocks.length;
  return (
    <p class="hint table-of">
      Block table of {name}, {many(table.total, "block")} ({kinds.join(", ")}): {table.blocks.join(", ")}
      {rest > 0 && ` and ${count(rest)} more`}.{numbered && " The numbers in the picture are its order."}
    </p>
  );
}
