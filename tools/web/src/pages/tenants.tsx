// Tenants: share of the service, fairness, quota and cost.

import { Bar } from "../components/bar";
import { Figures } from "../components/figures";
import { Panel } from "../components/panel";
import { Table } from "../components/table";
import { count, money, number, seconds, words } from "../format";
import { useLive } from "../live";
import type { Tenant } from "../types";

export function Tenants() {
  const { snapshot } = useLive();
  const part = snapshot?.tenants;
  if (!part) return <p class="hint">Waiting for the first figures.</p>;
  return (
    <div class="panels">
      {part.jain != null && (
        <Panel title="Fairness" note="Jain's index of service over fair share, in the last minute; 1 is fair.">
          <Figures figures={[{ name: "Jain's index", value: part.jain.toFixed(3) }]} />
        </Panel>
      )}
      <Panel
        title="Tenants"
        wide
        note={`The bar is the share of the tokens of the last minute; the mark is the fair share by weight and demand.${
          part.more ? ` ${count(part.more)} more tenants are not shown.` : ""
        }`}
      >
        <Table
          caption="Tenants"
          rows={part.tenants}
          rowKey={(row) => row.name}
          empty="No tenant has sent a request yet."
          columns={[
            { title: "Tenant", cell: (row) => row.name },
            { title: "Share", cell: (row) => <Bar value={row.share} mark={row.fair_share} label={`share of ${row.name}`} /> },
            { title: "Weight", number: true, cell: (row) => number(row.weight) },
            { title: "Open", number: true, cell: (row) => count(row.open_requests) },
            { title: "Requests", number: true, cell: (row) => count(row.requests) },
            { title: "Rejected", number: true, cell: (row) => count(row.refused) },
            { title: "Tokens", number: true, cell: (row) => count(row.tokens) },
            { title: "Device time", number: true, cell: (row) => seconds(row.device_seconds) },
            { title: "Cost", number: true, cell: (row) => money(row.cost, part.currency) },
          ]}
        />
      </Panel>
      <Quotas tenants={part.tenants} />
    </div>
  );
}

function Quotas({ tenants }: { tenants: Tenant[] }) {
  const limits = tenants.flatMap((tenant) =>
    Object.entries(tenant.limits).map(([name, room]) => ({ tenant: tenant.name, name, ...room })),
  );
  return (
    <Panel title="Quotas" wide>
      <Table
        caption="Remaining quotas"
        rows={limits}
        rowKey={(row) => `${row.tenant} ${row.name}`}
        empty="No tenant has a quota."
        columns={[
          { title: "Tenant", cell: (row) => row.tenant },
          { title: "Limit", cell: (row) => words(row.name) },
          { title: "Used", cell: (row) => <Bar value={1 - row.remaining / row.limit} label={`${words(row.name)} used by ${row.tenant}`} /> },
          { title: "Remaining", number: true, cell: (row) => count(row.remaining) },
          { title: "Full again in", number: true, cell: (row) => seconds(row.reset_seconds) },
        ]}
      />
    </Panel>
  );
}
