// A histogram as columns, with a text for screen readers.

interface Props {
  label: string;
  /** Names and counts of the buckets, in order. */
  buckets: { name: string; count: number }[];
}

export function Columns({ label, buckets }: Props) {
  const most = Math.max(1, ...buckets.map((each) => each.count));
  const total = buckets.reduce((sum, each) => sum + each.count, 0);
  const told = buckets
    .filter((each) => each.count)
    .map((each) => `${each.name}: ${Math.round((100 * each.count) / Math.max(1, total))} %`)
    .join(", ");
  return (
    <div class="columns" role="img" aria-label={`${label}. ${told || "no data"}`}>
      {buckets.map((each) => (
        <div key={each.name} title={`${each.name}: ${each.count}`}>
          <span style={{ height: `${(100 * each.count) / most}%` }} />
          <small>{each.name}</small>
        </div>
      ))}
    </div>
  );
}
