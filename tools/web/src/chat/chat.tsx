// Chat: conversations with a served model. They stay in this browser.

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, getJson } from "../api";
import { KeyForm } from "../components/key-form";
import { Navigation } from "../components/navigation";
import { count, many, seconds } from "../format";
import { readKey, writeKey } from "../key";
import { Prose, Tokens } from "./answer";
import { Chooser, imagesIn, Previews, read, type ImageLimits } from "./images";
import { ParameterForm } from "./parameters";
import { rateOf, send, type Progress, type Token } from "./send";
import { fresh, keep, load, titleOf, type Conversation, type Message, type Stats } from "./store";

interface Card {
  id: string;
  image_limits?: ImageLimits;
}

const NOTHING: Progress = { content: "", reasoning: "", tokens: [] };

export function Chat() {
  const [cards, setCards] = useState<Card[]>([]);
  const [needsKey, setNeedsKey] = useState("");
  const [all, setAll] = useState(load);
  const [now, setNow] = useState<Conversation>(() => fresh(all[0]?.parameters));
  const [progress, setProgress] = useState<Progress | null>(null);
  const [draft, setDraft] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const [refusal, setRefusal] = useState("");
  // Probabilities of answers of this visit: they are too large to keep.
  const [tokens] = useState(() => new WeakMap<Message, Token[]>());
  const abort = useRef<AbortController | null>(null);
  const input = useRef<HTMLTextAreaElement>(null);
  const end = useRef<HTMLDivElement>(null);
  const [key, setKey] = useState(readKey);

  useEffect(() => {
    getJson<{ data: Card[] }>("/v1/models").then(
      (told) => {
        setNeedsKey("");
        const names = told.data.map((each) => each.id);
        setCards(told.data);
        setNow((each) => (names.includes(each.parameters.model) ? each : withModel(each, names[0] ?? "")));
      },
      (reason: Error) => setNeedsKey(reason instanceof ApiError ? reason.message : `The server is not reached: ${reason.message}`),
    );
  }, [key]);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [progress, now.messages.length]);

  const save = (next: Conversation) => {
    // Another conversation may have been opened, and this one's parameters changed, while the answer arrived.
    setNow((each) => (each.id === next.id ? { ...next, parameters: each.parameters } : each));
    setAll((each) => keep([next, ...each.filter((other) => other.id !== next.id)]));
  };
  const answer = async (conversation: Conversation) => {
    const mine = (abort.current = new AbortController());
    let arrived = NOTHING;
    setProgress(NOTHING);
    save(conversation);
    const message: Message = { role: "assistant", content: "" };
    try {
      message.stats = await send(conversation.messages, conversation.parameters, mine.signal, (each) => {
        arrived = each;
        setProgress(each);
      });
    } catch (reason) {
      message.error = reason instanceof Error ? reason.message : String(reason);
    }
    message.content = arrived.content;
    if (arrived.reasoning) message.reasoning = arrived.reasoning;
    if (arrived.tokens.length) tokens.set(message, arrived.tokens);
    setProgress(null);
    save({ ...conversation, changed: Date.now(), messages: [...conversation.messages, message] });
    input.current?.focus();
  };
  const ask = () => {
    const content = draft.trim();
    if ((!content && !images.length) || progress) return;
    setDraft("");
    setImages([]);
    setRefusal("");
    const message: Message = { role: "user", content, ...(images.length ? { images } : {}) };
    void answer({ ...now, changed: Date.now(), messages: [...now.messages, message] });
  };
  const limits = cards.find((each) => each.id === now.parameters.model)?.image_limits;
  const add = (files: File[]) => {
    if (!limits || !files.length) return;
    const sent = now.messages.reduce((sum, message) => sum + (message.images?.length ?? 0), 0);
    setRefusal("");
    read(files, sent + images.length, limits).then(
      (urls) => setImages((each) => [...each, ...urls]),
      (reason: Error) => setRefusal(reason.message),
    );
  };
  const regenerate = () => void answer({ ...now, messages: now.messages.slice(0, -1) });
  const stop = () => abort.current?.abort();
  const open = (next: Conversation) => {
    stop();
    setNow(next);
    input.current?.focus();
  };
  const forget = (id: string) => {
    setAll((each) => keep(each.filter((other) => other.id !== id)));
    if (id === now.id) setNow(fresh(now.parameters));
  };

  return (
    <>
      <Navigation current="chat">
        {key && (
          <button type="button" class="quiet" onClick={() => (writeKey(""), setKey(""))}>
            Forget key
          </button>
        )}
      </Navigation>
      <main id="main" class="chat" onKeyDown={(event) => event.key === "Escape" && stop()}>
        <h1 class="hidden">Chat</h1>
        {needsKey ? (
          <KeyForm message={needsKey} enter={(given) => (writeKey(given), setKey(given))} />
        ) : (
          <>
            <aside>
              <button type="button" class="quiet" onClick={() => open(fresh(now.parameters))}>
                New conversation
              </button>
              <details open={innerWidth > 700}>
                <summary>Model and parameters</summary>
                <ParameterForm
                  models={cards.map((each) => each.id)}
                  chosen={now.parameters}
                  change={(parameters) => setNow({ ...now, parameters })}
                />
              </details>
              {all.length > 0 && (
                <details open={innerWidth > 700}>
                  <summary>Conversations in this browser</summary>
                  <Past all={all} now={now} open={open} forget={forget} />
                </details>
              )}
            </aside>
            <section class="talk" aria-label="Conversation">
              <div class="messages" role="log" aria-busy={progress !== null} tabIndex={0} aria-label="Messages">
                {now.messages.map((message, at) => (
                  <Said key={at} message={message} tokens={tokens.get(message)} />
                ))}
                {progress && (
                  <article class="assistant" aria-label="Answer">
                    <Reasoning text={progress.reasoning} />
                    <Prose text={progress.content} />
                    {!progress.content && !progress.reasoning && <p class="hint">Waiting for the first token.</p>}
                  </article>
                )}
                {!now.messages.length && !progress && <p class="hint">Ask something. Conversations stay in this browser.</p>}
                <div ref={end} />
              </div>
              {refusal && (
                <p class="notice" role="alert">
                  {refusal}
                </p>
              )}
              <Previews urls={images} remove={(at) => setImages(images.filter((_, other) => other !== at))} />
              <form
                class="ask"
                onDragOver={(event) => limits && event.preventDefault()}
                onDrop={(event) => {
                  if (!limits) return;
                  event.preventDefault();
                  add(imagesIn(event.dataTransfer));
                }}
                onSubmit={(event) => {
                  event.preventDefault();
                  ask();
                }}
              >
                <label class="hidden" for="message">
                  Message
                </label>
                <textarea
                  id="message"
                  ref={input}
                  rows={2}
                  placeholder="Message. Enter sends, Shift+Enter begins a line, Escape stops."
                  value={draft}
                  onInput={(event) => setDraft(event.currentTarget.value)}
                  onPaste={(event) => add(imagesIn(event.clipboardData))}
                  onKeyDown={(event) => {
                    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
                      event.preventDefault();
                      ask();
                    }
                  }}
                />
                {limits && <Chooser add={add} />}
                {progress ? (
                  <button type="button" onClick={stop}>
                    Stop
                  </button>
                ) : (
                  <button type="submit">Send</button>
                )}
                {!progress && now.messages.at(-1)?.role === "assistant" && (
                  <button type="button" class="quiet" onClick={regenerate}>
                    Regenerate
                  </button>
                )}
              </form>
            </section>
          </>
        )}
      </main>
    </>
  );
}

function withModel(conversation: Conversation, model: string): Conversation {
  return { ...conversation, parameters: { ...conversation.parameters, model } };
}

function Said({ message, tokens }: { message: Message; tokens: Token[] | undefined }) {
  const mine = message.role === "user";
  return (
    <article class={message.role} aria-label={mine ? "You" : "Answer"}>
      <Reasoning text={message.reasoning ?? ""} />
      <Previews urls={message.images ?? []} />
      {!message.images && message.images_not_kept && (
        <p class="hint">{many(message.images_not_kept, "image")}, no longer in this browser</p>
      )}
      {tokens ? <Tokens tokens={tokens} /> : <Prose text={message.content} />}
      {message.error && (
        <p class="notice" role="alert">
          {message.error}
        </p>
      )}
      {message.stats && <Numbers stats={message.stats} />}
    </article>
  );
}

function Reasoning({ text }: { text: string }) {
  return text ? (
    <details class="reasoning">
      <summary>Reasoning</summary>
      <Prose text={text} />
    </details>
  ) : null;
}

function Numbers({ stats }: { stats: Stats }) {
  const told = [
    stats.ttft === null ? "" : `first token ${seconds(stats.ttft)}`,
    rateOf(stats),
    stats.output_tokens === null ? "" : `${count(stats.prompt_tokens)} + ${count(stats.output_tokens)} tokens`,
    stats.cost,
    stats.finish === "stop" ? "" : stats.finish,
    stats.model,
  ];
  return (
    <p class="hint numbers">
      {told.filter(Boolean).join(" · ")}
      {stats.id && (
        <>
          {" · "}
          <a href={`dashboard#/request/${encodeURIComponent(stats.id)}`}>timeline</a>
        </>
      )}
    </p>
  );
}

interface PastProps {
  all: Conversation[];
  now: Conversation;
  open: (conversation: Conversation) => void;
  forget: (id: string) => void;
}

function Past({ all, now, open, forget }: PastProps) {
  return (
    <ul class="past">
      {all.map((each) => (
        <li key={each.id}>
          <button type="button" class="link" aria-pressed={each.id === now.id} onClick={() => open(each)}>
            {titleOf(each)}
          </button>
          <button type="button" class="quiet" aria-label={`Delete ${titleOf(each)}`} onClick={() => forget(each.id)}>
            ×
          </button>
        </li>
      ))}
    </ul>
  );
}
