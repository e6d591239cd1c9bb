// Conversations of this browser: in localStorage, bounded, never sent anywhere but in the requests of the chat itself.

export interface Stats {
  model: string;
  /** The id of the call, for its page. */
  id: string;
  ttft: number | null;
  seconds: number;
  prompt_tokens: number | null;
  output_tokens: number | null;
  finish: string;
  /** The price, or the device time of a server without prices. */
  cost: string;
}

export interface Message {
  role: "user" | "assistant";
  content: string;
  /** Images as data URLs. They are not kept in the browser, only their number. */
  images?: string[];
  images_not_kept?: number;
  reasoning?: string;
  stats?: Stats;
  error?: string;
}

export interface Parameters {
  model: string;
  system: string;
  temperature: number;
  top_p: number;
  max_tokens: number;
  seed: number | null;
  logprobs: boolean;
}

export interface Conversation {
  id: string;
  changed: number;
  parameters: Parameters;
  messages: Message[];
}

const NAME = "headrace.chat";
const MOST = 50;
const MOST_CHARACTERS = 1_000_000;

export const DEFAULTS: Parameters = {
  model: "",
  system: "",
  temperature: 0.7,
  top_p: 1,
  max_tokens: 256,
  seed: null,
  logprobs: false,
};

export function fresh(parameters: Parameters = DEFAULTS): Conversation {
  return { id: newId(), changed: Date.now(), parameters: { ...parameters }, messages: [] };
}

/** All conversations, newest first. Anything unreadable counts as none. */
export function load(): Conversation[] {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "[]") as Conversation[];
    return kept.filter((each) => Array.isArray(each.messages) && each.parameters).map((each) => ({
      ...each,
      parameters: { ...DEFAULTS, ...each.parameters },
    }));
  } catch {
    return [];
  }
}

/** Keep the newest conversations that fit; returns them. */
export function keep(conversations: Conversation[]): Conversation[] {
  const newest = conversations.filter((each) => each.messages.length).sort((a, b) => b.changed - a.changed);
  const kept: string[] = [];
  let characters = 2;
  for (const each of newest.slice(0, MOST)) {
    const text = JSON.stringify({ ...each, messages: each.messages.map(withoutImages) });
    characters += text.length + 1;
    if (characters > MOST_CHARACTERS) break;
    kept.push(text);
  }
  try {
    localStorage.setItem(NAME, `[${kept.join(",")}]`);
  } catch {
    // The browser keeps nothing (private mode, or its quota is used up): the chat goes on without it.
  }
  return newest.slice(0, kept.length);
}

function withoutImages({ images, ...message }: Message): Message {
  return images?.length ? { ...message, images_not_kept: images.length } : message;
}

export function titleOf(conversation: Conversation): string {
  const first = conversation.messages[0]?.content.trim().split("\n")[0] ?? "";
  return first.length > 48 ? `${first.slice(0, 47)}…` : first || "New conversation";
}

function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
