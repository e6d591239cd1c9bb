// Labelled controls of a form with their hints, and the server's errors about them.

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

export interface Described {
  id: string;
  "aria-describedby"?: string;
  "aria-invalid"?: true;
}

interface Props {
  label: string;
  hint?: string | undefined;
  error?: string | undefined;
  /** The control; it takes these properties. */
  children: (props: Described) => ComponentChildren;
}

export function Field({ label, hint, error, children }: Props) {
  const id = useId();
  const about = [hint ? `${id}-hint` : "", error ? `${id}-error` : ""].filter(Boolean).join(" ");
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children({
        id,
        ...(about ? { "aria-describedby": about } : {}),
        ...(error ? { "aria-invalid": true as const } : {}),
      })}
      {hint && (
        <small id={`${id}-hint`} class="quiet">
          {hint}
        </small>
      )}
      {error && (
        <small id={`${id}-error`} class="error">
          {error}
        </small>
      )}
    </div>
  );
}

type Control = Omit<Props, "children"> & { value: string; change: (value: string) => void };

/** A control that chooses one of some values. */
export function SelectField({ value, change, options, ...field }: Control & { options: readonly (readonly [string, string])[] }) {
  return (
    <Field {...field}>
      {(props) => (
        <select {...props} value={value} onChange={(event) => change(event.currentTarget.value)}>
          {options.map(([each, text]) => (
            <option key={each} value={each}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

/** A control for a number, which must be given. */
export function NumberField({ value, change, ...field }: Control) {
  return (
    <Field {...field}>
      {(props) => (
        <input
          {...props}
          type="number"
          step="any"
          required
          value={value}
          onInput={(event) => change(event.currentTarget.value)}
        />
      )}
    </Field>
  );
}
