// The id of a request, as lists show it: a link to its timeline.

import { href } from "../route";

export function RequestId({ id }: { id: string }) {
  return (
    <a href={href("request", id)} title={id}>
      <code>{id}</code>
    </a>
  );
}
