// Asks for an API key.

import { useState } from "preact/hooks";

interface Props {
  message: string;
  enter: (key: string) => void;
}

export function KeyForm({ message, enter }: Props) {
  const [key, setKey] = useState("");
  return (
    <form
      class="panel key"
      onSubmit={(event) => {
        event.preventDefault();
        enter(key.trim());
      }}
    >
      <p>{message}</p>
      <label>
        API key
        <input
          type="password"
          autocomplete="off"
          required
          value={key}
          onInput={(event) => setKey(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Connect</button>
      <p class="hint">
        The key stays in this browser tab. An admin key shows the whole server, an inference key its own tenant.
      </p>
    </form>
  );
}
