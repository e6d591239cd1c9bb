// Images of a message that is being written: chosen, pasted or dropped, checked against the limits of the model.

import { useRef } from "preact/hooks";
import { bytes, count } from "../format";

/** What the model takes, from its card in /v1/models. */
export interface ImageLimits {
  per_prompt: number;
  bytes: number;
  pixels: number;
}

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** Files as data URLs. Throws an error that names the file that cannot be sent, and the limit. */
export async function read(files: Iterable<File>, before: number, limits: ImageLimits): Promise<string[]> {
  const given = [...files];
  const most = count(limits.per_prompt);
  if (before + given.length > limits.per_prompt) throw new Error(`A conversation may have at most ${most} images.`);
  for (const file of given) {
    const name = file.name || "The image";
    if (!TYPES.includes(file.type)) throw new Error(`${name} is no image in PNG, JPEG, WebP or GIF format.`);
    if (file.size > limits.bytes) {
      throw new Error(`${name} has ${bytes(file.size)}; an image may have at most ${bytes(limits.bytes)}.`);
    }
    const pixels = await pixelsOf(file);
    if (pixels > limits.pixels) {
      throw new Error(`${name} has ${count(pixels)} pixels; an image may have at most ${count(limits.pixels)}.`);
    }
  }
  return Promise.all(given.map(urlOf));
}

/** The images among the files of a paste or a drop. */
export function imagesIn(transfer: DataTransfer | null): File[] {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

async function pixelsOf(file: File): Promise<number> {
  try {
    const image = await createImageBitmap(file);
    const pixels = image.width * image.height;
    image.close();
    return pixels;
  } catch {
    throw new Error(`${file.name || "The image"} cannot be read.`);
  }
}

function urlOf(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`${file.name || "The image"} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

export function Chooser({ add }: { add: (files: File[]) => void }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        class="hidden"
        multiple
        tabIndex={-1}
        aria-label="Image files"
        accept={TYPES.join(",")}
        onChange={(event) => {
          add([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
      <button type="button" class="quiet" onClick={() => input.current?.click()}>
        Add images
      </button>
    </>
  );
}

export function Previews({ urls, remove }: { urls: string[]; remove?: (at: number) => void }) {
  return urls.length ? (
    <ul class="pictures" aria-label="Images">
      {urls.map((url, at) => (
        <li key={at}>
          <img src={url} alt={`Image ${at + 1}`} />
          {remove && (
            <button type="button" class="quiet" aria-label={`Remove image ${at + 1}`} onClick={() => remove(at)}>
              ×
            </button>
          )}
        </li>
      ))}
    </ul>
  ) : null;
}
