// The address of a page within the document: `#/name/argument`.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  name: string;
  argument: string;
}

export function href(name: string, argument = ""): string {
  return `#/${name}${argument ? `/${encodeURIComponent(argument)}` : ""}`;
}

function current(): Route {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { name, argument: decodeURIComponent(rest.join("/")) };
}

export function useRoute(): Route {
  const [route, setRoute] = useState(current);
  useEffect(() => {
    const changed = () => setRoute(current());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
