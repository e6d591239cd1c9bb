// The form that starts an experiment, or simulates it first. Errors of the server are shown at their fields.

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, sendJson } from "../api";
import { number, setting as shown, words } from "../format";
import type { DryRun, Experiment, ExperimentList, Setting } from "../steering";
import { Field, NumberField, SelectField } from "./field";
import { Guards, type Guard } from "./guards";
import { Panel } from "./panel";

const DESIGNS: Record<string, string> = {
  time: "Switchback: the whole engine, in turns",
  request: "By request: each request has one of the values",
  tenant: "By tenant: each tenant has one of the values for a time",
};
const TIMES = [
  ["window_seconds", "Length of a window (s)", "30", "One measured window of the engine; a tenant keeps its value as long."],
  ["burn_in_seconds", "Burn-in (s)", "5", "Time after each change that is not measured."],
  ["max_seconds", "Maximum duration (s)", "7200", "An experiment without a decision ends after it."],
] as const;

interface Props {
  known: ExperimentList;
  started: (experiment: Experiment) => void;
  simulated: (dryRun: DryRun) => void;
}

interface Wrong {
  /** The field that the server names; empty for an error of the whole form. */
  param: string;
  message: string;
}

export function ExperimentForm({ known, started, simulated }: Props) {
  const names = Object.keys(known.settings);
  const [name, setName] = useState(names[0] ?? "");
  const [treatment, setTreatment] = useState("");
  const [unit, setUnit] = useState("");
  const [metric, setMetric] = useState("");
  const [guards, setGuards] = useState<Guard[]>([]);
  const [times, setTimes] = useState<Record<string, string>>(Object.fromEntries(TIMES.map(([each, , start]) => [each, start])));
  const [title, setTitle] = useState("");
  const [adopt, setAdopt] = useState(false);
  const [busy, setBusy] = useState("");
  const [wrong, setWrong] = useState<Wrong | null>(null);
  const [done, setDone] = useState("");
  const form = useRef<HTMLFormElement>(null);
  useEffect(() => form.current?.querySelector<HTMLElement>("[aria-invalid]")?.focus(), [wrong]);

  const chosen = known.settings[name];
  if (!chosen) return null;
  const by = chosen.units.includes(unit) ? unit : chosen.units[0]!;
  const metrics = Object.entries(known.metrics).filter(([, each]) => each.units.includes(by));
  const decides = metrics.some(([each]) => each === metric) ? metric : metrics[0]![0];
  const about = (param: string) => (wrong?.param === param ? wrong.message : undefined);
  const fields = ["setting", "treatment", "unit", "metric", "name", ...TIMES.map(([each]) => each)];
  const elsewhere = wrong && !fields.includes(wrong.param) && !guards.some((each) => wrong.param === `guards.${each.metric}`);

  const body = () => ({
    setting: name,
    treatment: chosen.choices ? treatment || chosen.choices[0]! : Number(treatment),
    unit: by,
    metric: decides,
    guards: Object.fromEntries(guards.map((each) => [each.metric, Number(each.percent) / 100])),
    ...Object.fromEntries(TIMES.map(([each]) => [each, Number(times[each])])),
    adopt,
    name: title.trim(),
  });
  const send = async <T,>(what: string, path: string, take: (answer: T) => string) => {
    if (!form.current?.reportValidity()) return;
    setBusy(what);
    setWrong(null);
    setDone("");
    try {
      setDone(take(await sendJson<T>("POST", path, body())));
    } catch (reason) {
      const message = reason instanceof Error ? reason.message : String(reason);
      const param = reason instanceof ApiError ? reason.param : "";
      setWrong({ param, message: message.replace(`${param}: `, "") });
    }
    setBusy("");
  };
  const start = () =>
    send<Experiment>("Starting.", "/v1/experiments", (experiment) => {
      started(experiment);
      return `Experiment ${experiment.id} has started.`;
    });
  const simulate = () =>
    send<DryRun>("Simulating; this takes up to a minute.", "/v1/experiments/dry-run", (result) => {
      simulated(result);
      return `The dry run has ended: ${words(result.status)}. Its result is below.`;
    });

  const compared = {
    label: "Treatment",
    hint: `The value to compare with the present one, ${shown(chosen.value)}. ${bounds(chosen)}`,
    error: about("treatment"),
    value: treatment,
    change: setTreatment,
  };

  return (
    <Panel title="New experiment" wide>
      <form
        ref={form}
        class="fields"
        onSubmit={(event) => {
          event.preventDefault();
          void start();
        }}
      >
        <SelectField
          label="Setting"
          hint={chosen.help}
          error={about("setting")}
          value={name}
          change={(next) => (setName(next), setTreatment(""))}
          options={names.map((each) => [each, words(each)])}
        />
        {chosen.choices ? (
          <SelectField {...compared} options={chosen.choices.map((each) => [each, each])} />
        ) : (
          <NumberField {...compared} />
        )}
        <SelectField
          label="Design"
          error={about("unit")}
          value={by}
          change={setUnit}
          options={chosen.units.map((each) => [each, DESIGNS[each] ?? each])}
        />
        <SelectField
          label="Metric"
          hint={`${known.metrics[decides]!.help} ${known.metrics[decides]!.better === "more" ? "More" : "Less"} is better.`}
          error={about("metric")}
          value={decides}
          change={setMetric}
          options={metrics.map(([each]) => [each, words(each)])}
        />
        {TIMES.map(([each, label, , hint]) => (
          <NumberField
            key={each}
            label={label}
            hint={hint}
            error={about(each)}
            value={times[each]!}
            change={(next) => setTimes({ ...times, [each]: next })}
          />
        ))}
        <Field label="Name" hint="Shown in the list; may be empty." error={about("name")}>
          {(props) => (
            <input {...props} type="text" value={title} onInput={(event) => setTitle(event.currentTarget.value)} />
          )}
        </Field>
        <Guards guards={guards} metrics={metrics} change={setGuards} error={(each) => about(`guards.${each}`)} />
        <label class="choice all">
          <input type="checkbox" checked={adopt} onChange={(event) => setAdopt(event.currentTarget.checked)} />
          Keep the treatment if it is better
        </label>
        <div class="buttons all">
          <button type="button" class="quiet" disabled={busy !== ""} onClick={() => void simulate()}>
            Dry run in the simulator
          </button>
          <button type="submit" disabled={busy !== ""}>
            Start on live traffic
          </button>
          <span role="status">{busy || done}</span>
        </div>
        {elsewhere && (
          <p class="notice all" role="alert">
            {wrong.message}
          </p>
        )}
        {wrong && !elsewhere && (
          <p class="hidden" role="alert">
            {wrong.message}
          </p>
        )}
      </form>
    </Panel>
  );
}

function bounds({ low, high, choices }: Setting): string {
  return choices ? "" : `From ${number(low)} to ${number(high)}.`;
}
