// A titled part of a page.

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface Props {
  title: string;
  note?: string | undefined;
  wide?: boolean;
  children: ComponentChildren;
}

export function Panel({ title, note, wide, children }: Props) {
  const id = useId();
  return (
    <section class={wide ? "panel wide" : "panel"} aria-labelledby={id}>
      <h2 id={id}>{title}</h2>
      {children}
      {note && <p class="hint">{note}</p>}
    </section>
  );
}
