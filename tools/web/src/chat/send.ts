// One answer: a streamed chat completion, with its times and its cost.

import { getJson } from "../api";
import { money, seconds } from "../format";
import { events } from "../stream";
import type { Message, Parameters, Stats } from "./store";

export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

/** What has arrived of an answer. */
export interface Progress {
  content: string;
  reasoning: string;
  tokens: Token[];
}

interface Logprob {
  token: string;
  logprob: number;
  top_logprobs: { token: string; logprob: number }[];
}

interface Chunk {
  id: string;
  model: string;
  error?: { message: string };
  choices: {
    delta: { content?: string | null; reasoning_content?: string | null };
    finish_reason: string | null;
    logprobs?: { content: Logprob[] | null } | null;
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
}

const ALTERNATIVES = 5;

export function body(messages: Message[], parameters: Parameters): Record<string, unknown> {
  const { model, system, temperature, top_p, max_tokens, seed, logprobs } = parameters;
  const said = messages.filter((each) => !each.error).map(({ role, content, images }) => ({
    role,
    content: images?.length ? [...images.map(imagePart), ...(content ? [{ type: "text", text: content }] : [])] : content,
  }));
  return {
    ...(model ? { model } : {}),
    messages: system.trim() ? [{ role: "system", content: system }, ...said] : said,
    temperature,
    top_p,
    max_tokens,
    ...(seed === null ? {} : { seed }),
    ...(logprobs ? { logprobs: true, top_logprobs: ALTERNATIVES } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function imagePart(url: string): Record<string, unknown> {
  return { type: "image_url", image_url: { url } };
}

/** Send the messages; `tell` receives what has arrived so far, at most once per frame of the screen. */
export async function send(
  messages: Message[],
  parameters: Parameters,
  signal: AbortSignal,
  tell: (progress: Progress) => void,
): Promise<Stats> {
  const began = performance.now();
  const progress: Progress = { content: "", reasoning: "", tokens: [] };
  const stats: Stats = {
    model: parameters.model,
    id: "",
    ttft: null,
    seconds: 0,
    prompt_tokens: null,
    output_tokens: null,
    finish: "stopped",
    cost: "",
  };
  let frame = 0;
  const show = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      tell({ ...progress });
    });
  };
  const init = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body(messages, parameters)),
  };
  try {
    for await (const chunk of events<Chunk>("/v1/chat/completions", signal, init)) {
      if (chunk.error) throw new Error(chunk.error.message);
      stats.id = chunk.id;
      stats.model = chunk.model;
      if (chunk.usage) {
        stats.prompt_tokens = chunk.usage.prompt_tokens;
        stats.output_tokens = chunk.usage.completion_tokens;
      }
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content } = choice.delta;
      if (content || reasoning_content) stats.ttft ??= (performance.now() - began) / 1e3;
      progress.content += content ?? "";
      progress.reasoning += reasoning_content ?? "";
      for (const each of choice.logprobs?.content ?? []) progress.tokens.push(tokenOf(each));
      if (choice.finish_reason) stats.finish = choice.finish_reason;
      show();
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    cancelAnimationFrame(frame);
    stats.seconds = (performance.now() - began) / 1e3;
    tell({ ...progress });
  }
  stats.cost = stats.id ? await costOf(stats.id) : "";
  return stats;
}

function tokenOf(given: Logprob): Token {
  return {
    text: given.token,
    logprob: given.logprob,
    top: given.top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob })),
  };
}

/** The price of a call; of a server without prices, the device time. Empty if this key may not see it. */
async function costOf(id: string): Promise<string> {
  try {
    const { cost } = await getJson<{ cost: { total?: number; currency?: string; device_seconds?: number } }>(
      `/v1/requests/${encodeURIComponent(id)}`,
    );
    if (cost.total !== undefined) return money(cost.total, cost.currency ?? "");
    return cost.device_seconds === undefined ? "" : `${seconds(cost.device_seconds)} of device time`;
  } catch {
    return "";
  }
}

export function rateOf(stats: Stats): string {
  if (!stats.output_tokens || stats.ttft === null || stats.output_tokens < 2) return "";
  const took = stats.seconds - stats.ttft;
  return took > 0 ? `${((stats.output_tokens - 1) / took).toFixed(1)} tokens/s` : "";
}
