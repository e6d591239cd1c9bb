// The hit rate of a cache layer. Coalesced requests have none: nothing counts the requests that found no other to join.

import { words } from "../format";
import { Bar } from "./bar";

export function HitRate({ layer, rate }: { layer: string; rate: number | null | undefined }) {
  if (rate == null || layer === "coalesced") return <>–</>;
  return <Bar value={rate} label={`hit rate of ${words(layer)}`} />;
}
