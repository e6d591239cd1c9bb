// A share as a bar, with an optional mark, and as text.

import { share } from "../format";

interface Props {
  value: number | null | undefined;
  /** A second share to compare with, drawn as a mark. */
  mark?: number | null;
  label: string;
}

export function Bar({ value, mark, label }: Props) {
  const width = Math.max(0, Math.min(1, value ?? 0));
  return (
    <span class="bar" role="img" aria-label={`${label}: ${share(value)}`}>
      <span class="track">
        <span class="fill" style={{ width: `${100 * width}%` }} />
        {mark != null && <span class="mark" style={{ left: `${100 * Math.min(1, mark)}%` }} />}
      </span>
      <span aria-hidden="true">{share(value)}</span>
    </span>
  );
}
