// Model, system prompt and sampling parameters of a conversation.

import type { Parameters as Chosen } from "./store";

interface Props {
  models: string[];
  chosen: Chosen;
  change: (chosen: Chosen) => void;
}

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0.05, 1, 0.05],
  ["max_tokens", "Maximum output tokens", 1, 32768, 1],
] as const;

export function ParameterForm({ models, chosen, change }: Props) {
  return (
    <div class="parameters">
      <label>
        Model
        <select value={chosen.model} onChange={(event) => change({ ...chosen, model: event.currentTarget.value })}>
          {models.map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </label>
      <label>
        System prompt
        <textarea
          rows={3}
          value={chosen.system}
          placeholder="None: the model's template decides"
          onInput={(event) => change({ ...chosen, system: event.currentTarget.value })}
        />
      </label>
      {NUMBERS.map(([name, title, least, most, step]) => (
        <label key={name}>
          {title}
          <input
            type="number"
            min={least}
            max={most}
            step={step}
            value={chosen[name]}
            onInput={(event) => {
              const value = event.currentTarget.valueAsNumber;
              if (!Number.isNaN(value)) change({ ...chosen, [name]: value });
            }}
          />
        </label>
      ))}
      <label>
        Seed
        <input
          type="number"
          step={1}
          placeholder="random"
          value={chosen.seed ?? ""}
          onInput={(event) => {
            const value = event.currentTarget.valueAsNumber;
            change({ ...chosen, seed: Number.isNaN(value) ? null : value });
          }}
        />
      </label>
      <label class="choice">
        <input
          type="checkbox"
          checked={chosen.logprobs}
          onChange={(event) => change({ ...chosen, logprobs: event.currentTarget.checked })}
        />
        Show probabilities of new answers
      </label>
    </div>
  );
}
