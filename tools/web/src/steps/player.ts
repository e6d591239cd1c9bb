// The place in a film: paused or playing, with a speed, moved by buttons and keys.

import { useEffect, useState } from "preact/hooks";

export const SPEEDS = [0.5, 1, 2, 4, 8] as const;
const STEPS_PER_SECOND = 4;

export interface Player {
  /** From 0 to `last`. */
  at: number;
  last: number;
  playing: boolean;
  speed: number;
  go: (at: number) => void;
  play: (playing: boolean) => void;
  setSpeed: (speed: number) => void;
}

/** A player over `length` places; with `following` it goes to the last place whenever one is added. */
export function usePlayer(length: number, following = false): Player {
  const [at, setAt] = useState(0);
  const [playing, play] = useState(false);
  const [speed, setSpeed] = useState(1);
  const last = Math.max(0, length - 1);

  useEffect(() => {
    if (following) setAt(last);
  }, [following, last]);
  useEffect(() => {
    if (!playing) return;
    const timer = setInterval(() => setAt((now) => Math.min(last, now + 1)), 1000 / (STEPS_PER_SECOND * speed));
    return () => clearInterval(timer);
  }, [playing, speed, last]);
  useEffect(() => {
    if (at >= last) play(false);
  }, [at, last]);

  const go = (to: number) => setAt(Math.max(0, Math.min(last, to)));
  return {
    at: Math.min(at, last),
    last,
    playing,
    speed,
    go,
    play: (next) => {
      if (next && at >= last) setAt(0);
      play(next);
    },
    setSpeed,
  };
}

/** Keys of the region around a film: arrows, Home, End, space. */
export function playerKeys(player: Player) {
  return (event: KeyboardEvent) => {
    const target = event.target as HTMLElement;
    if (target.closest("input, select, textarea, button, a")) return;
    const to: Record<string, number> = {
      ArrowLeft: player.at - 1,
      ArrowRight: player.at + 1,
      Home: 0,
      End: player.last,
    };
    if (event.key === " ") player.play(!player.playing);
    else if (event.key in to) player.go(to[event.key]!);
    else return;
    event.preventDefault();
  };
}
