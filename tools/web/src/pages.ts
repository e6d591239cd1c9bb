// The table of pages. To add a page: one file in pages/, one row here.

import type { ComponentType } from "preact";
import { Caches } from "./pages/caches";
import { Experiments } from "./pages/experiments";
import { Overview } from "./pages/overview";
import { Request } from "./pages/request";
import { Requests } from "./pages/requests";
import { Steps } from "./pages/steps";
import { Tenants } from "./pages/tenants";
import { Tour } from "./pages/tour";
import { Tuner } from "./pages/tuner";

export interface PageProps {
  /** What follows the page's name in the address: `#/name/argument`. */
  argument: string;
}

export interface Page {
  /** The address is `#/name`. */
  name: string;
  title: string;
  view: ComponentType<PageProps>;
  /** The part of the live stream that it needs beside the overview. */
  part?: string;
  /** Not in the navigation; other pages link to it. */
  hidden?: boolean;
}

export const PAGES: readonly Page[] = [
  { name: "overview", title: "Overview", view: Overview },
  { name: "requests", title: "Requests", view: Requests, part: "requests" },
  { name: "caches", title: "Caches", view: Caches, part: "caches" },
  { name: "tenants", title: "Tenants", view: Tenants, part: "tenants" },
  { name: "experiments", title: "Experiments", view: Experiments },
  { name: "tuner", title: "Tuner", view: Tuner },
  { name: "steps", title: "Step by step", view: Steps },
  { name: "tour", title: "Guided tour", view: Tour },
  { name: "request", title: "Request", view: Request, hidden: true },
];
