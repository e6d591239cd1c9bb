// A labelled control of a form with its hint, and the server's error about it.

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
