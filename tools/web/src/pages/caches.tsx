// Caches: hits, misses, savings and sizes of each layer.

import { HitRate } from "../components/hit-rate";
import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { bytes, count, money, seconds, words } from "../format";
import { useLive } from "../live";
import type { CacheLayer } from "../types";

type Layer = [string, CacheLayer];

export function Caches() {
  const { snapshot } = useLive();
  const caches = snapshot?.caches;
  if (!caches) return <p class="hint">Waiting for the first figures.</p>;
  const layers = Object.entries(caches.layers);
  const currency = snapshot.overview.cost?.currency ?? "";
  return (
    <div class="panels">
      <Layers layers={layers} />
      <Savings layers={layers} currency={currency} />
      <Stores layers={layers} />
      <Counts title="Misses by reason" caption="Misses by layer and reason" counts={reasons(layers)} />
      {caches.bypasses && <Counts title="Not cacheable" caption="Requests that bypass the caches" counts={caches.bypasses} />}
      {caches.faults && <Counts title="Faults of stores" caption="Faults by store" counts={caches.faults} />}
    </div>
  );
}

function Layers({ layers }: { layers: Layer[] }) {
  return (
    <Panel title="Hits" wide note="Since the server started.">
      <Table
        caption="Hits of each cache layer"
        rows={layers}
        rowKey={([name]) => name}
        empty="No cache layer has been used yet."
        columns={[
          { title: "Layer", cell: ([name]) => words(name) },
          { title: "Hit rate", cell: ([name, it]) => <HitRate layer={name} rate={it.hit_rate} /> },
          { title: "Hits", number: true, cell: ([, it]) => count(it.hits) },
          { title: "Misses", number: true, cell: ([, it]) => count(it.misses) },
          { title: "Mean lookup", number: true, cell: ([, it]) => seconds(it.lookup_seconds_mean) },
          { title: "Audits right", number: true, cell: ([, it]) => count(it.audited_right) },
          { title: "Audits wrong", number: true, cell: ([, it]) => count(it.audited_wrong) },
        ]}
      />
    </Panel>
  );
}

function Savings({ layers, currency }: { layers: Layer[]; currency: string }) {
  return (
    <Panel title="Savings">
      <Table
        caption="Savings of each cache layer"
        rows={layers}
        rowKey={([name]) => name}
        empty="Nothing has been saved yet."
        columns={[
          { title: "Layer", cell: ([name]) => words(name) },
          { title: "Prompt tokens", number: true, cell: ([, it]) => count(it.saved_prompt_tokens) },
          { title: "Output tokens", number: true, cell: ([, it]) => count(it.saved_output_tokens) },
          { title: "Cost", number: true, cell: ([, it]) => money(it.saved_cost, currency) },
        ]}
      />
    </Panel>
  );
}

function Stores({ layers }: { layers: Layer[] }) {
  const stores = layers.flatMap(([layer, it]) =>
    Object.entries(it.stores ?? {}).map(([name, facts]) => ({ layer, name, ...facts })),
  );
  return (
    <Panel title="Stores">
      <Table
        caption="Stores of each cache layer"
        rows={stores}
        rowKey={(row) => `${row.layer} ${row.name}`}
        empty="There is no store, or this key may not see it."
        columns={[
          { title: "Store", cell: (row) => `${words(row.layer)}: ${row.name}` },
          { title: "Entries", number: true, cell: (row) => count(row.entries) },
          { title: "Size", number: true, cell: (row) => bytes(row.bytes) },
          { title: "Evictions", number: true, cell: (row) => count(row.evictions) },
        ]}
      />
    </Panel>
  );
}

function Counts({ title, caption, counts }: { title: string; caption: string; counts: Record<string, number> }) {
  return (
    <Panel title={title}>
      <Table
        caption={caption}
        rows={Object.entries(counts).sort((one, other) => other[1] - one[1])}
        rowKey={([name]) => name}
        empty="None."
        columns={[
          { title: "Reason", cell: ([name]) => words(name) },
          { title: "Count", number: true, cell: ([, number]) => count(number) },
        ]}
      />
    </Panel>
  );
}

function reasons(layers: Layer[]): Record<string, number> {
  return Object.fromEntries(
    layers.flatMap(([layer, it]) =>
      Object.entries(it.misses_by_reason ?? {}).map(([reason, number]) => [`${layer}: ${reason}`, number]),
    ),
  );
}
