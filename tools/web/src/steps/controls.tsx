// Buttons, slider and speed of a film.

import { SPEEDS, type Player } from "./player";

interface Props {
  player: Player;
  /** What the slider moves over, such as "step 12 of 40". */
  place: string;
}

export function Controls({ player, place }: Props) {
  const { at, last, playing } = player;
  return (
    <div class="controls" role="group" aria-label="Playback">
      <button type="button" class="quiet" aria-label="First step" disabled={at === 0} onClick={() => player.go(0)}>
        |◀
      </button>
      <button type="button" class="quiet" aria-label="Step back" disabled={at === 0} onClick={() => player.go(at - 1)}>
        ◀
      </button>
      <button type="button" onClick={() => player.play(!playing)}>
        {playing ? "Pause" : "Play"}
      </button>
      <button
        type="button"
        class="quiet"
        aria-label="Step forward"
        disabled={at === last}
        onClick={() => player.go(at + 1)}
      >
        ▶
      </button>
      <button
        type="button"
        class="quiet"
        aria-label="Last step"
        disabled={at === last}
        onClick={() => player.go(last)}
      >
        ▶|
      </button>
      <input
        type="range"
        aria-label="Step"
        aria-valuetext={place}
        min={0}
        max={last}
        value={at}
        onInput={(event) => player.go(Number(event.currentTarget.value))}
      />
      <output>{place}</output>
      <label>
        Speed
        <select value={player.speed} onChange={(event) => player.setSpeed(Number(event.currentTarget.value))}>
          {SPEEDS.map((each) => (
            <option key={each} value={each}>
              {each}×
            </option>
          ))}
        </select>
      </label>
    </div>
  );
}
