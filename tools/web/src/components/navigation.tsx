// The bar at the top of every document: all pages of the dashboard and the chat, so that each is reached from each.

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { PAGES } from "../pages";
import { href } from "../route";

const CHAT = "chat";
const LINKS = [
  ...PAGES.filter((page) => !page.hidden).map(({ name, title }) => ({ name, title, to: `dashboard${href(name)}` })),
  { name: CHAT, title: "Chat", to: CHAT },
];

/** `current` is the name of the page that is shown; the children stand at the end of the bar. */
export function Navigation({ current, children }: { current: string; children: ComponentChildren }) {
  const bar = useRef<HTMLElement>(null);
  useEffect(() => {
    // On a phone the bar scrolls sideways.
    const link = bar.current?.querySelector<HTMLElement>("[aria-current]");
    if (bar.current && link) bar.current.scrollLeft = link.offsetLeft - bar.current.clientWidth / 2 + link.offsetWidth / 2;
  }, [current]);
  return (
    <header>
      <a class="brand" href="./">
        Headrace
      </a>
      <nav aria-label="Pages" ref={bar}>
        {LINKS.map((each) => (
          <a key={each.name} href={each.to} aria-current={each.name === current ? "page" : undefined}>
            {each.title}
          </a>
        ))}
      </nav>
      {children}
    </header>
  );
}
