// Figures with their names, as a description list.

export interface Figure {
  name: string;
  value: string;
  hint?: string;
}

export function Figures({ figures }: { figures: Figure[] }) {
  return (
    <dl class="figures">
      {figures.map((each) => (
        <div key={each.name}>
          <dt>{each.name}</dt>
          <dd>
            {each.value}
            {each.hint && <small> {each.hint}</small>}
          </dd>
        </div>
      ))}
    </dl>
  );
}
