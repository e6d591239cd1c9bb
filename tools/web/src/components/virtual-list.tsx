// A table of many rows: only those on the screen are in the document. Rows have one height.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

const ROW = 32;
const BESIDE = 8;

export interface VirtualColumn<Row> {
  title: string;
  /** Width as a grid track. */
  width: string;
  cell: (row: Row) => ComponentChildren;
  number?: boolean;
}

interface Props<Row> {
  label: string;
  columns: VirtualColumn<Row>[];
  rows: Row[];
  rowKey: (row: Row) => string;
}

export function VirtualList<Row>({ label, columns, rows, rowKey }: Props<Row>) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 640 });

  useEffect(() => {
    const element = box.current!;
    const look = () => setView({ top: element.scrollTop, height: element.clientHeight });
    look();
    element.addEventListener("scroll", look, { passive: true });
    const resized = new ResizeObserver(look);
    resized.observe(element);
    return () => {
      element.removeEventListener("scroll", look);
      resized.disconnect();
    };
  }, []);

  const first = Math.max(0, Math.min(Math.floor(view.top / ROW) - BESIDE, rows.length - 1));
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / ROW) + BESIDE);
  const tracks = { gridTemplateColumns: columns.map((column) => column.width).join(" ") };
  return (
    <div ref={box} class="virtual" role="table" aria-label={label} aria-rowcount={rows.length + 1} tabIndex={0}>
      <div role="rowgroup" class="head">
        <div role="row" aria-rowindex={1} class="row" style={tracks}>
          {columns.map((column) => (
            <span key={column.title} role="columnheader" class={column.number ? "number" : undefined}>
              {column.title}
            </span>
          ))}
        </div>
      </div>
      <div role="rowgroup" class="body" style={{ height: `${rows.length * ROW}px` }}>
        {rows.slice(first, last).map((row, at) => (
          <div
            key={rowKey(row)}
            role="row"
            aria-rowindex={first + at + 2}
            class="row"
            style={{ ...tracks, top: `${(first + at) * ROW}px` }}
          >
            {columns.map((column) => (
              <span key={column.title} role="cell" class={column.number ? "number" : undefined}>
                {column.cell(row)}
              </span>
            ))}
          </div>
        ))}
      </div>
    </div>
  );
}
