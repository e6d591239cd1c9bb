// The text of a message. A model's text is only ever a text node: no markup in it is interpreted, except code fences.

import { useState } from "preact/hooks";
import type { Token } from "./send";

export function Prose({ text }: { text: string }) {
  // Every second part of a split at fences is code; an open fence is code too.
  const parts = text.split(/^```[^\n]*\n?/m);
  return (
    <>
      {parts.map((part, at) =>
        at % 2 ? (
          <pre key={at} tabIndex={0} aria-label="Code">
            <code>{part}</code>
          </pre>
        ) : (
          part && (
            <p key={at} class="said">
              {part}
            </p>
          )
        ),
      )}
    </>
  );
}

const PERCENT = 100;

/** Tokens with their probabilities: on hover, or with the arrow keys. */
export function Tokens({ tokens }: { tokens: Token[] }) {
  const [at, go] = useState<number | null>(null);
  const shown = at === null ? null : tokens[at];
  return (
    <>
      <p
        class="said tokens"
        role="group"
        tabIndex={0}
        aria-label="Tokens with probabilities; arrow keys select one"
        onKeyDown={(event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (!step) return;
          event.preventDefault();
          go(Math.max(0, Math.min(tokens.length - 1, (at ?? -1) + step)));
        }}
        onMouseLeave={() => go(null)}
      >
        {tokens.map((token, place) => (
          <span
            key={place}
            class={`token ${level(token.logprob)} ${place === at ? "chosen" : ""}`}
            onMouseEnter={() => go(place)}
          >
            {token.text}
          </span>
        ))}
      </p>
      <output class="hint alternatives">
        {shown
          ? `${quoted(shown.text)} ${percent(shown.logprob)} · instead: ${
              shown.top
                .filter((each) => each.text !== shown.text)
                .map((each) => `${quoted(each.text)} ${percent(each.logprob)}`)
                .join(", ") || "–"
            }`
          : "Point at a token to see its probability."}
      </output>
    </>
  );
}

function level(logprob: number): string {
  const p = Math.exp(logprob);
  return p > 0.8 ? "sure" : p > 0.3 ? "likely" : "unlikely";
}

function percent(logprob: number): string {
  return `${(PERCENT * Math.exp(logprob)).toFixed(1)} %`;
}

// Characters that turn the text after them around are shown by their numbers.
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

function quoted(text: string): string {
  const numbered = text.replace(TURNING, (each) => `U+${each.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
  return `“${numbered.replaceAll("\n", "⏎")}”`;
}
