// The frame of all pages: navigation, connection, key, and the page that the address names.

import { useEffect, useRef } from "preact/hooks";
import { KeyForm } from "./components/key-form";
import { Navigation } from "./components/navigation";
import { writeKey, readKey } from "./key";
import { follow, forget, useLive, type Connection } from "./live";
import { PAGES } from "./pages";
import { useRoute } from "./route";

const STATES: Record<Connection, string> = {
  connecting: "Connecting",
  live: "Live",
  lost: "Connection lost, retrying",
  key: "API key needed",
  refused: "Not allowed",
};

export function App() {
  const route = useRoute();
  const live = useLive();
  const page = PAGES.find((each) => each.name === route.name) ?? PAGES[0]!;
  const heading = useRef<HTMLHeadingElement>(null);
  const shown = useRef(page.name);

  useEffect(() => follow(page.part), [page.part]);
  useEffect(() => {
    document.title = `${page.title} · Headrace`;
    if (shown.current !== page.name) heading.current?.focus(); // a screen reader reads the new page's name
    shown.current = page.name;
  }, [page.name]);

  const enter = (key: string) => {
    writeKey(key);
    forget();
    follow(page.part);
  };
  const View = page.view;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), heading.current?.focus())}>
        Skip to content
      </a>
      <Navigation current={page.name}>
        <p class={`connection ${live.connection}`} role="status">
          {STATES[live.connection]}
        </p>
        {readKey() && (
          <button type="button" class="quiet" onClick={() => enter("")}>
            Forget key
          </button>
        )}
      </Navigation>
      <main id="main">
        <h1 ref={heading} tabIndex={-1}>
          {page.title}
          {live.snapshot?.overview.tenant != null && <small> of {live.snapshot.overview.tenant}</small>}
        </h1>
        {live.connection === "key" && <KeyForm message={live.error} enter={enter} />}
        {live.connection === "refused" && (
          <>
            <p class="notice">{live.error}</p>
            <KeyForm message="Use another key to see this page." enter={enter} />
          </>
        )}
        {live.connection === "lost" && <p class="notice">{live.error}</p>}
        {live.connection !== "key" && live.connection !== "refused" && (
          <View key={page.name} argument={route.argument} />
        )}
      </main>
    </>
  );
}
