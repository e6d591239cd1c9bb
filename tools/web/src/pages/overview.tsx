// Overview: what the server does now, and what bounds it.

import { Bar } from "../components/bar";
import { Columns } from "../components/columns";
import { Figures } from "../components/figures";
import { HitRate } from "../components/hit-rate";
import { Panel } from "../components/panel";
import { Plot } from "../components/plot";
import { Table } from "../components/table";
import { count, money, rate, seconds, share, words } from "../format";
import { useLive } from "../live";
import type { Overview as Facts, Quantiles, ServiceClass, Snapshot } from "../types";

const KINDS = {
  slots: "Slots",
  memory: "Memory",
  arithmetic: "Arithmetic",
  bandwidth: "Bandwidth",
  front_end: "Front end",
  idle: "Idle",
};

export function Overview() {
  const { snapshot, history } = useLive();
  if (!snapshot) return <p class="hint">Waiting for the first figures.</p>;
  const facts = snapshot.overview;
  return (
    <div class="panels">
      {facts.bottleneck && (
        <section class={`panel wide bottleneck ${facts.bottleneck.kind}`} aria-label="Bottleneck">
          {/* Read aloud when the kind changes; the sentence has figures that change every second. */}
          <strong aria-live="polite">{KINDS[facts.bottleneck.kind]}</strong>
          <p>{facts.bottleneck.sentence}</p>
        </section>
      )}
      <Now facts={facts} />
      <Throughput history={history} />
      <Latency facts={facts} />
      <Queue facts={facts} history={history} />
      {facts.batch && <Batch batch={facts.batch} />}
      {facts.kv && <Memory kv={facts.kv} history={history} />}
      <Hits facts={facts} />
      {facts.classes && <Classes classes={facts.classes} />}
      {facts.cost && <Cost cost={facts.cost} history={history} />}
    </div>
  );
}

function Now({ facts }: { facts: Facts }) {
  const { rates, shares } = facts;
  return (
    <Panel title="Now" wide note="Rates are means of the last five seconds.">
      <Figures
        figures={[
          { name: "Output tokens", value: rate(rates?.output_tokens), hint: "/s" },
          { name: "Prompt tokens", value: rate(rates?.prompt_tokens), hint: "/s" },
          { name: "Requests ended", value: rate(rates?.requests), hint: "/s" },
          { name: "Running", value: count(facts.running), hint: facts.slots ? `of ${count(facts.slots)}` : "" },
          { name: "Waiting", value: count(facts.waiting) },
          ...(facts.model
            ? [
                {
                  name: "Parameters",
                  value: count(facts.model.num_parameters),
                  hint: `${count(facts.model.active_parameters)} per token`,
                },
              ]
            : []),
          ...(shares ? [{ name: "Computing", value: share(shares.computing), hint: "of the time" }] : []),
        ]}
      />
    </Panel>
  );
}

function Throughput({ history }: { history: Snapshot[] }) {
  const of = (name: "output_tokens" | "prompt_tokens") => history.map((each) => each.overview.rates?.[name] ?? null);
  return (
    <Panel title="Throughput" note="Tokens per second.">
      <Plot
        label="Throughput in tokens per second"
        x={history.map((each) => each.time)}
        lines={[
          { label: "output", values: of("output_tokens") },
          { label: "prompt", values: of("prompt_tokens") },
        ]}
        format={count}
      />
    </Panel>
  );
}

function Latency({ facts }: { facts: Facts }) {
  const { latency } = facts;
  const rows: [string, string, Quantiles | null][] = [
    ["ttft", "Time to first token (TTFT)", latency.ttft],
    ["tpot", "Time per output token (TPOT)", latency.tpot],
    ["e2e", "End to end (E2E)", latency.e2e],
  ];
  return (
    <Panel title="Latency" note={`Of ${count(latency.requests)} requests that ended in the last minute.`}>
      <Table
        caption="Latency percentiles"
        rows={rows}
        rowKey={(row) => row[0]}
        empty=""
        columns={[
          { title: "Measure", cell: (row) => row[1] },
          { title: "p50", number: true, cell: (row) => seconds(row[2]?.[0]) },
          { title: "p95", number: true, cell: (row) => seconds(row[2]?.[1]) },
          { title: "p99", number: true, cell: (row) => seconds(row[2]?.[2]) },
        ]}
      />
    </Panel>
  );
}

function Queue({ facts, history }: { facts: Facts; history: Snapshot[] }) {
  return (
    <Panel title="Queue" note={`${count(facts.waiting)} waiting, ${count(facts.running)} running.`}>
      <Plot
        label="Requests"
        x={history.map((each) => each.time)}
        lines={[
          { label: "running", values: history.map((each) => each.overview.running) },
          { label: "waiting", values: history.map((each) => each.overview.waiting) },
        ]}
        format={count}
      />
    </Panel>
  );
}

function Batch({ batch }: { batch: NonNullable<Facts["batch"]> }) {
  const buckets = batch.counts.map((each, at) => {
    const high = batch.bounds[at];
    const low = at ? batch.bounds[at - 1]! + 1 : 1;
    const name = high === undefined ? `${low}+` : low === high ? `${high}` : `${low}–${high}`;
    return { name, count: each };
  });
  const last = buckets.findLastIndex((each) => each.count > 0);
  return (
    <Panel title="Batch size" note="Rows per step, over the steps of the last five seconds.">
      <Columns label="Rows per step" buckets={buckets.slice(0, Math.max(6, last + 1))} />
    </Panel>
  );
}

function Memory({ kv, history }: { kv: NonNullable<Facts["kv"]>; history: Snapshot[] }) {
  return (
    <Panel
      title="KV cache"
      note={`${share(kv.usage, 1)} of ${count(kv.blocks)} blocks held; ${share(kv.waste, 1)} of their slots are empty.`}
    >
      <Plot
        label="KV cache"
        x={history.map((each) => each.time)}
        lines={[
          { label: "held", values: history.map((each) => each.overview.kv?.usage ?? null) },
          { label: "empty slots", values: history.map((each) => each.overview.kv?.waste ?? null) },
        ]}
        format={(value) => share(value)}
      />
    </Panel>
  );
}

function Hits({ facts }: { facts: Facts }) {
  const layers = Object.entries(facts.caches);
  return (
    <Panel title="Cache hit rates" note="Since the server started; see Caches.">
      <Table
        caption="Hit rate of each cache layer"
        rows={layers}
        rowKey={(row) => row[0]}
        empty="No cache layer has been used yet."
        columns={[
          { title: "Layer", cell: ([name]) => words(name) },
          { title: "Hits", number: true, cell: ([, layer]) => count(layer.hits) },
          {
            title: "Hit rate",
            cell: ([name, layer]) => <HitRate layer={name} rate={layer.hit_rate} />,
          },
        ]}
      />
    </Panel>
  );
}

function Classes({ classes }: { classes: ServiceClass[] }) {
  return (
    <Panel title="Goodput" note="Share of recent requests that met all their latency targets, by service class.">
      <Table
        caption="Goodput by service class"
        rows={classes}
        rowKey={(row) => row.name}
        empty="No request has arrived yet."
        columns={[
          { title: "Class", cell: (row) => row.name },
          { title: "Running", number: true, cell: (row) => count(row.running) },
          { title: "Waiting", number: true, cell: (row) => count(row.waiting) },
          { title: "Missed", number: true, cell: (row) => count(row.missed) },
          { title: "Goodput", cell: (row) => <Bar value={row.goodput} label={`goodput of ${row.name}`} /> },
        ]}
      />
    </Panel>
  );
}

function Cost({ cost, history }: { cost: NonNullable<Facts["cost"]>; history: Snapshot[] }) {
  const values = history.map((each) => each.overview.cost?.per_million_tokens ?? null);
  return (
    <Panel
      title="Cost"
      note={`Per million tokens, prompt and output, idle time included. ${
        cost.per_hour == null ? "" : `The device costs ${money(cost.per_hour, cost.currency)} an hour.`
      }`}
    >
      <Figures
        figures={[
          { name: "Per million tokens, now", value: money(cost.per_million_tokens, cost.currency) },
          { name: "Requests so far", value: money(cost.total, cost.currency) },
        ]}
      />
      {values.some((each) => each != null) && (
        <Plot
          label="Cost per million tokens"
          x={history.map((each) => each.time)}
          lines={[{ label: "per million tokens", values }]}
          format={(value) => money(value, "")}
          height={120}
        />
      )}
    </Panel>
  );
}
