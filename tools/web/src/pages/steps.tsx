// Step by step: the rows of each step, of this server, of a simulation, or of a recording in a file.

import { useEffect, useRef, useState } from "preact/hooks";
import { sendJson } from "../api";
import { Panel } from "../components/panel";
import { download } from "../download";
import { count, words } from "../format";
import { href } from "../route";
import { Controls } from "../steps/controls";
import { useLiveFilm } from "../steps/live";
import { playerKeys, usePlayer } from "../steps/player";
import { ScenarioForm } from "../steps/scenario";
import { readFilm, type Film, type Scenario } from "../steps/types";
import { StepView } from "../steps/view";

const SOURCES = { live: "This server", simulation: "Simulation", file: "Recording" } as const;
type Source = keyof typeof SOURCES;

export function Steps() {
  const [source, setSource] = useState<Source>("live");
  const [following, follow] = useState(true);
  const [made, setMade] = useState<{ film: Film; scenario?: Scenario } | null>(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const [chosen, choose] = useState<string | null>(null);
  const live = useLiveFilm(source === "live" && following, chosen);
  const film = source === "live" ? live.film : made?.film ?? null;
  const player = usePlayer(film?.steps.length ?? 0, source === "live" && following);
  const shown = useRef<HTMLElement>(null);
  useEffect(() => setError(""), [source]);

  const open = (next: { film: Film; scenario?: Scenario }) => {
    setMade(next);
    player.go(0);
    player.play(false);
  };
  const attempt = async (work: () => Promise<void>) => {
    setBusy(true);
    setError("");
    try {
      await work();
    } catch (reason) {
      setError(reason instanceof Error ? reason.message : String(reason));
    }
    setBusy(false);
  };
  const simulate = (scenario: Scenario) =>
    attempt(async () => {
      open({ film: await sendJson<Film>("POST", "/v1/simulations", scenario), scenario });
      shown.current?.focus();
    });
  const select = (next: Source) => {
    setSource(next);
    setMade(null);
    choose(null);
    follow(true);
  };
  const step = film?.steps[player.at];
  return (
    <>
      <p class="hint">
        A column is a step of the engine, a lane is a request. New here? Take the <a href={href("tour")}>guided tour</a>.
      </p>
      <div class="filters" role="group" aria-label="Source of the steps">
        {(Object.keys(SOURCES) as Source[]).map((each) => (
          <label key={each} class="choice">
            <input type="radio" name="source" checked={source === each} onChange={() => select(each)} />
            {SOURCES[each]}
          </label>
        ))}
        {source === "live" && (
          <button type="button" aria-pressed={following} onClick={() => follow(!following)}>
            {following ? "Stop following" : "Follow"}
          </button>
        )}
        <Export source={source} scenario={made?.scenario} attempt={attempt} />
      </div>
      {(error || (source === "live" && live.error)) && (
        <p class="notice" role="alert">
          {error || live.error}
        </p>
      )}
      {source === "simulation" && (
        <Panel title="Workload and settings" wide>
          <ScenarioForm run={simulate} busy={busy} />
        </Panel>
      )}
      {source === "file" && (
        <Panel title="Recording" wide note="Record with headrace serve --record-trace FILE. The file stays in this browser.">
          <label class="file">
            File of <code>headrace replay FILE --steps STEPS.json</code>
            <input
              type="file"
              accept=".json,application/json"
              onChange={(event) => {
                const file = event.currentTarget.files?.[0];
                if (file) void attempt(async () => open({ film: readFilm(await file.text()) }));
              }}
            />
          </label>
        </Panel>
      )}
      {film && film.steps.length > 0 && (
        <section class="stage" aria-label="Steps; arrow keys move by one step" tabIndex={0} ref={shown} onKeyDown={playerKeys(player)}>
          {!(source === "live" && following) && (
            <Controls player={player} place={`step ${step?.step ?? 0}, ${player.at + 1} of ${film.steps.length}`} />
          )}
          <StepView
            film={film}
            at={player.at}
            chosen={chosen}
            choose={choose}
            title={source === "live" && following ? "Now" : "Steps"}
          />
          <Settings film={film} />
        </section>
      )}
      {film && !film.steps.length && !live.error && (
        <p class="hint" role="status">
          No step has run since this page was opened. Send a request, or take a simulation.
        </p>
      )}
    </>
  );
}

function Export({
  source,
  scenario,
  attempt,
}: {
  source: Source;
  scenario: Scenario | undefined;
  attempt: (work: () => Promise<void>) => Promise<void>;
}) {
  if (source === "file" || (source === "simulation" && !scenario)) return null;
  const path = source === "live" ? "/v1/steps?limit=1000&format=perfetto" : "/v1/simulations?format=perfetto";
  const init =
    source === "live"
      ? {}
      : { method: "POST", body: JSON.stringify(scenario), headers: { "Content-Type": "application/json" } };
  return (
    <button type="button" class="quiet" onClick={() => void attempt(() => download(path, "steps.perfetto.json", init))}>
      Export for Perfetto
    </button>
  );
}

function Settings({ film }: { film: Film }) {
  return (
    <p class="hint">
      {Object.entries(film.settings)
        .map(([name, value]) => `${words(name)} ${typeof value === "number" ? count(value) : String(value)}`)
        .join(" · ")}
      {film.cut && " · further steps are left out"}
    </p>
  );
}
